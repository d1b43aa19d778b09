"""`postroom ingest` and its dead letters, on a real NATS server."""

import asyncio
from pathlib import Path

import nats
import pytest
import yaml

from postroom.adapters.compose.queries import read_mailbox
from postroom.domain.message import MessageSent
from tests.e2e.conftest import Done, Postroom
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.stores import envelope

DEAD = "dead.acme"


class Ingestion:
    """The command with a namespace file, at a server with the streams ACME and DEAD."""

    def __init__(self, postroom: Postroom, url: str) -> None:
        self.postroom = postroom
        self.url = url
        self.file = postroom.folder / "namespaces.yaml"

    def configure(self, validation: str) -> None:
        source = {
            "url": self.url,
            "subject": "acme.>",
            "consumer_group": "archive",
            "dead_letter_subject": DEAD,
        }
        namespace = {
            "name": "acme",
            "pattern": "mailbox",
            "schemas": {"envelope": {"validation": validation}},
            "slots": {
                "message_source": {"backend": "nats", "config": source},
                "storage": {"backend": "sqlite", "config": {"database_path": "postroom.db"}},
            },
        }
        self.file.write_text(yaml.safe_dump({"namespaces": [namespace]}))

    def ingest(self) -> dict[str, int]:
        done = self.postroom.ok("ingest", "--config", self.file.name, "--once", "--json")
        counts: dict[str, int] = done.lines[-1]
        return {name: n for name, n in counts.items() if n and name not in ("received", "seconds")}

    def dead_letters(self) -> list[tuple[str, int]]:
        letters = self("list", "--json").json["dead_letters"]
        return [(letter["subject"], letter["sequence"]) for letter in letters]

    def __call__(self, *arguments: str) -> Done:
        return self.postroom("ingest", "dlq", *arguments, "--config", self.file.name)

    def publish(self, *messages: tuple[str, bytes]) -> None:
        async def publish() -> None:
            client = await nats.connect(self.url)
            stream = client.jetstream()
            await stream.add_stream(name="ACME", subjects=["acme.>"])
            await stream.add_stream(name="DEAD", subjects=["dead.>"])
            for subject, data in messages:
                await stream.publish(subject, data, headers={"trace": "abc"})
            await client.close()

        asyncio.run(publish())

    def stored_topics(self) -> list[str]:
        with read_mailbox(str(self.postroom.store), "acme@archive") as reader:
            return [
                record.event.topic for record in reader.log.read() if isinstance(record.event, MessageSent)
            ]


@pytest.fixture
def ingestion(postroom: Postroom, nats_url: str) -> Ingestion:
    ingestion = Ingestion(postroom, nats_url)
    ingestion.configure("strict")
    ingestion.publish(
        ("acme.a", envelope("", topic="first")),
        ("acme.b", b"no envelope\x1b[31m"),
        ("acme.a", envelope("", topic="second")),
        ("acme.c", envelope("id", topic="third")),
    )
    return ingestion


@pytest.mark.parametrize("source", ["nobody", "no stream"])
def test_no_store_is_created_while_the_source_cannot_be_read(
    postroom: Postroom, nats_url: str, source: str
) -> None:
    url = nats_url if source == "no stream" else f"nats://{LOOPBACK}:{free_port()}"
    before = list(postroom.folder.iterdir())
    done = postroom("ingest", "--subject", "acme.>", "--durable", "archive", "--url", url, "--once")
    assert done.code != 0
    assert "can't be reached" in done.err or "No stream" in done.err
    assert list(postroom.folder.iterdir()) == before


def test_dead_letters_are_listed_and_shown_as_they_came(ingestion: Ingestion) -> None:
    assert ingestion.ingest() == {"stored": 1, "dead_lettered": 3}
    assert ingestion.dead_letters() == [("acme.a", 1), ("acme.b", 2), ("acme.a", 3)]
    assert "not a PrismEnvelope" in ingestion("list", "--wide").out
    shown = ingestion("show", "2").out
    assert "\x1b" not in shown
    assert "trace" in shown
    assert ingestion("show", "2", "--payload").out == "no envelope\x1b[31m"
    letter = ingestion("show", "2", "--json").json
    assert (letter["subject"], letter["sequence"], letter["consumer"]) == ("acme.b", 2, "archive")
    assert letter["headers"] == {"trace": "abc"}


def test_redriven_dead_letters_are_ingested_in_their_order_and_gone(ingestion: Ingestion) -> None:
    ingestion.ingest()
    assert "acme.b" in ingestion("redrive", "--dry-run").out
    assert len(ingestion.dead_letters()) == 3
    ingestion.configure("warn")
    assert ingestion("redrive", "--json").json == {"redriven": 3}
    assert ingestion.dead_letters() == []
    assert ingestion.ingest() == {"stored": 2, "dead_lettered": 1}
    assert ingestion.stored_topics() == ["third", "first", "second"]
    assert ingestion.dead_letters() == [("acme.b", 6)]


def test_some_dead_letters_are_redriven_and_some_discarded(ingestion: Ingestion) -> None:
    ingestion.ingest()
    ingestion.configure("warn")
    assert ingestion("redrive", "3").out == "1 dead letter redriven\n"
    assert ingestion("discard", "2", "1").out == "2 dead letters discarded\n"
    assert ingestion.dead_letters() == []
    assert ingestion.ingest() == {"stored": 1}
    assert ingestion.stored_topics() == ["third", "second"]


def test_a_redrive_that_no_stream_takes_leaves_the_dead_letters_where_they_are(ingestion: Ingestion) -> None:
    ingestion.ingest()

    async def change_subjects() -> None:
        client = await nats.connect(ingestion.url)
        await client.jetstream().update_stream(name="ACME", subjects=["acme.a"])
        await client.close()

    asyncio.run(change_subjects())
    refused = ingestion("redrive")
    assert refused.code != 0
    assert refused.out == "1 dead letter redriven\n"
    assert "No stream has the subject acme.b" in refused.err
    assert ingestion.dead_letters() == [("acme.b", 2), ("acme.a", 3)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("show", "9"), "There is no dead letter 9 at dead.acme"),
        (("discard", "x"), "'x' is not the number of a dead letter"),
        (("redrive", "1", "9"), "There is no dead letter 9 at dead.acme"),
        (("list", "--dlq", "dead.x"), "omit --dlq and --url"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(
    ingestion: Ingestion, arguments: tuple[str, ...], reason: str
) -> None:
    ingestion.ingest()
    done = ingestion(*arguments)
    assert done.code != 0
    assert reason in done.err
    assert len(ingestion.dead_letters()) == 3


def test_without_a_file_the_subject_and_the_server_are_options(
    ingestion: Ingestion, postroom: Postroom, tmp_path: Path
) -> None:
    ingestion.ingest()
    where = ("--dlq", DEAD, "--url", ingestion.url)
    assert len(postroom.ok("ingest", "dlq", "list", *where, "--json").json["dead_letters"]) == 3
    assert "Name the dead-letter subject" in postroom("ingest", "dlq", "list").err
    other = postroom("ingest", "dlq", "list", "--dlq", "other.dead", "--url", ingestion.url)
    assert "No stream has the subject other.dead" in other.err
