"""`postroom doctor` on the command line."""

from tests.e2e.conftest import Postroom


def test_doctor_fails_when_a_check_does_and_says_what_to_do_within_80_columns(postroom: Postroom) -> None:
    (postroom.folder / "postroom.toml").write_text(
        'store = "folder/orders.db"\n[nats]\nurl = "nats://127.0.0.1:1"\n[inbox]\nconcurency = 3\n'
    )
    done = postroom("doctor", "--json", "--within", "120s")
    assert done.code == 1
    failures = {each["check"]: each for each in done.json["checks"] if each["status"] == "failure"}
    assert not done.json["ok"]
    assert {"settings", "store", "nats"} <= set(failures)
    assert "did you mean concurrency?" in failures["settings"]["finding"]
    assert failures["store"]["advice"].startswith("Run: mkdir -p ")
    lines = postroom("doctor", "--within", "120s").out.splitlines()
    assert lines[0].split() == ["check", "status", "finding", "what", "to", "do"]
    assert max(map(len, lines)) <= 80
    assert sorted(each.name for each in postroom.folder.iterdir()) == ["postroom.toml"]


def test_doctor_succeeds_in_an_empty_folder(postroom: Postroom) -> None:
    done = postroom.ok("doctor", "--json", "--within", "120s")
    assert done.json["ok"]
