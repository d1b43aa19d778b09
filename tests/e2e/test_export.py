import json

import pytest

from tests.e2e.conftest import Postroom
from tests.projections.histories import build_without_spark
from tests.support.exports import FORMATS, read_back


@pytest.fixture
def built(postroom: Postroom) -> Postroom:
    """A store with read models of three messages."""
    for topic in ("orders", "orders", "mails"):
        postroom.ok("send", topic, f"about {topic}", "--attr", "tenant=acme")
    build_without_spark(postroom.store)
    return postroom


def test_an_export_says_what_it_wrote_and_search_prints_the_same(built: Postroom) -> None:
    assert "3 messages (" in built.ok("export", "json", "all").out
    searched = built.ok("search", "--order", "oldest", "--envelope", "--json").lines
    exported = [json.loads(line) for line in (built.folder / "all").read_text("utf-8").splitlines()]
    assert sorted(exported, key=lambda row: row["position"]) == searched

    facts = built.ok("export", "csv", "orders", "--topic", "ord*", "--header", "tenant=acme", "--json").json
    assert (facts["messages"], facts["file"], facts["version"]) == (2, "orders", 1)
    assert facts["filter"] == {"topics": ["ord*"], "headers": {"tenant": "acme"}}
    assert facts["bytes"] == (built.folder / "orders").stat().st_size


@pytest.mark.parametrize("format_", FORMATS)
def test_envelopes_and_payloads_are_exported_as_asked_for(built: Postroom, format_: str) -> None:
    built.ok("export", format_, "plain", "--no-envelope")
    assert not {"envelope", "payload"} & set(read_back(format_, built.folder / "plain")[0])
    built.ok("export", format_, "full", "--payload", "mails")
    (row,) = read_back(format_, built.folder / "full")
    assert (row["payload"], row["topic"]) == (b"about mails", "mails")
    assert row["envelope"]


def test_an_export_that_can_not_be_made_says_why(built: Postroom) -> None:
    built.ok("export", "csv", "out")
    again = built("export", "csv", "out", "--json")
    assert (again.code, "add --overwrite" in again.error["message"]) == (1, True)
    built.ok("export", "csv", "out", "--overwrite")
    nothing = built("export", "csv", "none", "--topic", "nothing")
    assert (nothing.code, "0 messages" in nothing.out) == (3, True)
    for wrong in (("xml", "out"), ("delta", "out"), ("csv", "out", "--since", "yesterday")):
        assert built("export", *wrong).code == 2
    (built.folder / "elsewhere").mkdir()
    unknown = built("export", "csv", "elsewhere/out", "--store", "missing.db")
    assert (unknown.code, list((built.folder / "elsewhere").iterdir())) == (3, [])
