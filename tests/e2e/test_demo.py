import json


def test_the_demo_tells_its_story_to_the_end_and_leaves_a_store_to_look_at(postroom):
    told = postroom.ok("demo").out

    for part in (
        "20,000 sent, 398 of them duplicates",
        "messages in hand and was killed",
        "19,584 acked; 18 that nobody can process died after 3 attempts",
        "19,602 messages from",
        "demo@local: 0 ready",
        "is negative",
        "visibility_expired",
        "shop-lima",
        "Try next",
    ):
        assert part in told, part
    there = {"POSTROOM_STORE": "postroom-demo.db", "POSTROOM_MAILBOX": "demo@local"}
    assert len(postroom.ok("dlq", "list", "--json", **there).json["dead_letters"]) == 18
    dead = postroom.ok("search", "--status", "dead", "--json", **there).out.splitlines()
    assert {json.loads(line)["attempts"] for line in dead} == {3}
    postroom.ok("verify", **there)


def test_the_demo_leaves_alone_a_store_it_did_not_make(postroom):
    postroom.ok("send", "orders", "precious")

    done = postroom("demo", "--store", "postroom.db")

    assert (done.code, "was not made by the demo" in done.err) == (1, True)
    assert postroom.ok("recv", "orders", "--json").lines[0]["payload"] == "precious"


def test_the_demo_runs_in_memory_too(postroom):
    facts = postroom.ok("demo", "--store", "memory:", "--json").json

    assert (facts["sent"], facts["duplicates"], facts["acked"], facts["dead"]) == (20_000, 398, 19_584, 18)
    assert 0 < len(facts["redelivered"]) <= 100
    assert list(postroom.folder.iterdir()) == []
