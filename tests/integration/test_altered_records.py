"""Commits altered on disk are noticed: messages are quarantined, and a log that can't be folded is named."""

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest
import zstandard

from postroom.adapters.parquet.log_archive import ParquetLogArchive
from postroom.application.mailbox import log_writer
from postroom.application.mailbox.codec import compress, decompress
from postroom.application.queries.verify import VerifyLog
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import BrokenLog
from postroom.domain.policy import DAY_MS, MailboxLimits
from tests.support.stores import MAILBOX, Place, message, postgres_place, sqlite_place

PAYLOAD = b"precious"

Execute = Callable[[str, Sequence[object]], list[tuple[Any, ...]]]


class AlteredPlace:
    """A store and what a person with access to its disk can do to it.

    Arguments:
        execute: run one SQL statement whose parameters are written as `?`.
    """

    def __init__(
        self, place: Place, execute: Callable[[str, Sequence[object]], list[tuple[Any, ...]]]
    ) -> None:
        self.open = place.open
        self.clock = place.clock
        self._open_log = place.open_log
        self._execute = execute

    def verify(self) -> None:
        """Verify the log; raises BrokenLog."""
        log = self._open_log()
        try:
            VerifyLog(log)()
        finally:
            log.close()

    def value(self, position: int, column: str) -> Any:
        """Return a column of the commit at a position, which is its first."""
        ((value,),) = self._execute(f"SELECT {column} FROM log WHERE place & 1099511627775 = ?", (position,))
        return value

    def alter(self, position: int, column: str, value: object) -> None:
        """Overwrite a column of the commit at a position."""
        self._execute(f"UPDATE log SET {column} = ? WHERE place & 1099511627775 = ?", (value, position))

    def delete(self, position: int) -> None:
        """Delete the commit at a position."""
        self._execute("DELETE FROM log WHERE place & 1099511627775 = ?", (position,))


def in_sqlite(path: Path) -> Execute:
    def execute(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(path)) as connection, connection:
            return connection.execute(statement, values).fetchall()

    return execute


def in_postgres(url: str) -> Execute:
    def execute(statement: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with psycopg.connect(url, autocommit=True, options="-csearch_path=postroom") as connection:
            cursor = connection.execute(statement.replace("?", "%s"), values)
            return cursor.fetchall() if cursor.description else []

    return execute


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> AlteredPlace:
    if request.param == "sqlite":
        return AlteredPlace(sqlite_place(tmp_path), in_sqlite(tmp_path / "store.db"))
    url: str = request.getfixturevalue("postgres_store")
    return AlteredPlace(postgres_place(url), in_postgres(url))


def change(alter: Callable[[PrismEnvelope], object]) -> Callable[[bytes], bytes]:
    def changed(blob: bytes) -> bytes:
        envelope = PrismEnvelope.FromString(blob)
        alter(envelope)
        return envelope.SerializeToString()

    return changed


ALTERATIONS: dict[str, Callable[[bytes], bytes]] = {
    "the principal": change(lambda envelope: setattr(envelope.security, "publisher_id", "mallory")),
    "the correlation id": change(lambda envelope: setattr(envelope.metadata, "correlation_id", "c-2")),
    "the content type": change(lambda envelope: setattr(envelope.metadata, "content_type", "text/html")),
    "the priority": change(lambda envelope: setattr(envelope.metadata, "priority", 9)),
    "the payload": lambda envelope: envelope.replace(PAYLOAD, b"worthless"[:8]),
    "a field that we don't read": lambda envelope: envelope + b"\xfa\x3f\x03new",
    "junk": lambda envelope: b"\xff\xff",
    "nothing": lambda envelope: b"",
}
PARTS: dict[str, Callable[[bytes], bytes]] = {
    "junk": lambda part: b"\xc1\xff",
    "nothing": lambda part: b"",
    "an envelope too few": lambda part: msgspec.msgpack.encode(msgspec.msgpack.decode(part)[1:]),
    "an envelope too many": lambda part: msgspec.msgpack.encode([b"", *msgspec.msgpack.decode(part)]),
    "half of a compressed part": lambda part: compress(part * 99)[:50],
    "a compressed part that is too large": lambda part: b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8,
}


def alter_first(place: AlteredPlace, position: int, alter: Callable[[bytes], bytes]) -> None:
    """Alter the first envelope of the commit at a position."""
    first, *others = msgspec.msgpack.decode(decompress(place.value(position, "envelopes"), position))
    place.alter(position, "envelopes", msgspec.msgpack.encode([alter(first), *others]))


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
async def test_an_altered_message_is_quarantined_and_the_others_are_delivered(
    place: AlteredPlace, alter: Callable[[bytes], bytes]
) -> None:
    sent = {"principal": "alice", "correlation_id": "c-1", "content_type": "text/plain"}
    async with place.open() as mailbox:
        await mailbox.send_batch(
            [
                message(PAYLOAD, message_id="own-1", attrs={"note": "mine"}, **sent),
                message(b"other", message_id="own-3"),
            ]
        )
    alter_first(place, 3, alter)

    async with place.open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"other"]
        (letter,) = (await mailbox.list_dead_letters()).items
        assert (letter.reason, letter.last_error) == ("integrity", "stored bytes do not match their hash")
        assert not (await mailbox.get_message("own-1")).intact
        assert (await mailbox.get_message("own-3")).intact
        assert (await mailbox.explain_message("own-1")).now
    async with place.open() as mailbox:
        assert [each.reason for each in (await mailbox.list_dead_letters()).items] == ["integrity"]


@pytest.mark.parametrize("alter", ALTERATIONS.values(), ids=ALTERATIONS)
async def test_a_message_altered_while_its_mailbox_is_open_is_quarantined(
    place: AlteredPlace, alter: Callable[[bytes], bytes]
) -> None:
    async with place.open(cache_bytes=0) as mailbox:
        await mailbox.send_message(message(PAYLOAD, message_id="own-1", attrs={"note": "mine"}))
        await mailbox.send_message(message(topic="others"))  # evicts the first from the cache
        alter_first(place, 3, alter)
        assert await mailbox.receive_messages("orders") == []
        assert [each.reason for each in (await mailbox.list_dead_letters()).items] == ["integrity"]


@pytest.mark.parametrize("alter", PARTS.values(), ids=PARTS)
async def test_the_messages_of_a_commit_whose_envelopes_cannot_be_read_are_quarantined(
    place: AlteredPlace, alter: Callable[[bytes], bytes]
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(PAYLOAD), message(PAYLOAD)])
        await mailbox.send_message(message(b"later"))
    place.alter(3, "envelopes", alter(decompress(place.value(3, "envelopes"), 3)))
    async with place.open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"later"]
        assert [each.reason for each in (await mailbox.list_dead_letters()).items] == [
            "integrity",
            "integrity",
        ]
    with pytest.raises(BrokenLog):
        place.verify()


@pytest.mark.parametrize("events", [b"\xc1", b"\x90", b"\x28\xb5\x2f\xfd"])
async def test_the_messages_of_a_commit_that_cannot_be_decoded_are_quarantined_if_a_snapshot_covers_it(
    place: AlteredPlace, monkeypatch: pytest.MonkeyPatch, events: bytes
) -> None:
    monkeypatch.setattr(log_writer, "CLOSING_SNAPSHOT_EVENTS", 1)
    async with place.open() as mailbox:
        await mailbox.send_batch([message(PAYLOAD), message(PAYLOAD)])
        await mailbox.send_message(message(b"later"))
    place.alter(3, "events", events)
    async with place.open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"later"]
        assert (await mailbox.get_backlog()).ready == 0
    with pytest.raises(BrokenLog):
        place.verify()


async def test_altered_headers_are_found_by_get_message_and_verify(
    place: AlteredPlace,
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message(PAYLOAD, message_id="own-1", principal="alice"))
    async with place.open() as mailbox:
        assert (await mailbox.get_message("own-1")).intact
    events = decompress(place.value(3, "events"), 3)
    place.alter(3, "events", events.replace(b"alice", b"malet"))
    async with place.open() as mailbox:
        detail = await mailbox.get_message("own-1")
        assert (detail.item.principal, detail.intact) == ("malet", False)
    with pytest.raises(BrokenLog, match=r"positions 3 to 3 does not match its hash") as broken:
        place.verify()
    assert broken.value.position == 3


async def test_an_unaltered_message_is_delivered_with_its_headers(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(
            message(PAYLOAD, attrs={"b": "2", "a": b"\xff", "c": "\U0001f4ee"}, correlation_id="c-1")
        )
    async with place.open() as mailbox:
        (received,) = await mailbox.receive_messages("orders")
        assert (received.payload, received.correlation_id) == (PAYLOAD, "c-1")
        assert received.attrs == {"b": "2", "a": "base64:/w==", "c": "\U0001f4ee"}


async def test_a_missing_commit_in_the_middle_is_named_at_open(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        for number in range(5):
            await mailbox.send_message(message(bytes([number])))
    place.delete(5)
    with pytest.raises(BrokenLog, match="acme@one has no event at position 5, but one at 6") as broken:
        async with place.open():
            pytest.fail("opened a log with a gap")
    assert broken.value.position == 5


@pytest.mark.parametrize("events", [b"\xc1", b"", b"\x90", b"\x28\xb5\x2f\xfd", b"\x94\x01\x02\x03\x04"])
async def test_a_commit_that_cannot_be_decoded_is_named_at_open(place: AlteredPlace, events: bytes) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await mailbox.receive_messages("orders")
    place.alter(4, "events", events)
    with pytest.raises(BrokenLog, match=r"position(s 4 to)? 4 can't be deco") as broken:
        async with place.open():
            pytest.fail("opened a log that can't be decoded")
    assert broken.value.position == 4


async def test_an_event_that_contradicts_the_ones_before_is_named_at_open(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        (received,) = await mailbox.receive_messages("orders")
    events = decompress(place.value(4, "events"), 4)
    place.alter(4, "events", events.replace(received.receipt.message, b"another message!"))
    with pytest.raises(BrokenLog, match="position 4 can't be applied") as broken:
        async with place.open():
            pytest.fail("opened a log that can't be folded")
    assert broken.value.position == 4


async def test_commits_that_changed_places_are_named(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message(b"1"))
        await mailbox.send_message(message(b"2"))
    for column in ("events", "envelopes", "chain"):  # in the end the whole commits have changed places
        third, fourth = (place.value(position, column) for position in (3, 4))
        place.alter(3, column, fourth)
        place.alter(4, column, third)
        with pytest.raises(BrokenLog, match=r"positions 3 to 3 does not match its hash"):
            place.verify()


def without_an_event(part: bytes) -> bytes:
    """Return a commit's only run with its last event dropped from the columns that differ."""
    (run,) = msgspec.msgpack.decode(part)
    tag, count, streams, *columns = run
    shorter = [each[: -len(each) // count] if type(each) in (bytes, list) else each for each in columns]
    return compress(msgspec.msgpack.encode([[tag, count - 1, streams[:-16], *shorter]]))


def larger_than_stated(part: bytes) -> bytes:
    """Return a part compressed, with a header that states a byte less."""
    frame = zstandard.compress(part)
    stated = len(part) - 256  # as two bytes, for sizes below 64 KiB
    assert frame.index(stated.to_bytes(2, "little")) < 10
    return frame.replace(stated.to_bytes(2, "little"), (stated - 1).to_bytes(2, "little"), 1)


DEFECTS: dict[str, Callable[[bytes], bytes]] = {
    "torn in the middle": lambda part: compress(part)[: len(compress(part)) // 2],
    "torn before it was compressed": lambda part: compress(part[: len(part) // 2]),
    "an event fewer": without_an_event,
    "larger than it states": larger_than_stated,
}


@pytest.mark.parametrize("damage", DEFECTS.values(), ids=DEFECTS)
async def test_a_commit_that_is_not_whole_is_named_at_open_and_by_verify(
    place: AlteredPlace, damage: Callable[[bytes], bytes]
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(bytes([number]), idem_key=str(number)) for number in range(4)])
        await mailbox.send_message(message(b"later"))
    place.alter(3, "events", damage(decompress(place.value(3, "events"), 3)))
    with pytest.raises(BrokenLog, match=r"positions? 3") as broken:
        place.verify()
    assert broken.value.position == 3
    with pytest.raises(BrokenLog, match=r"positions? 3") as broken:
        async with place.open():
            pytest.fail("opened a log with a commit that is not whole")
    assert broken.value.position == 3


@pytest.mark.parametrize("has_archive", [False, True], ids=["removed", "archived"])
async def test_retention_keeps_a_commit_that_cannot_be_decoded_and_names_it(
    place: AlteredPlace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_archive: bool
) -> None:
    monkeypatch.setattr(log_writer, "CLOSING_SNAPSHOT_EVENTS", 1)
    limits = MailboxLimits(history_retention_ms=1)
    async with place.open(limits=limits) as mailbox:
        await mailbox.send_batch([message(PAYLOAD), message(PAYLOAD)])
        await mailbox.purge_topic("orders", ready=True)
    place.alter(3, "events", b"\xc1")
    place.clock.advance(2 * DAY_MS)
    archive = ParquetLogArchive(tmp_path / "archive") if has_archive else None
    async with place.open(archive=archive) as mailbox:
        log = mailbox.engine.log
        before = [commit.first for commit in log.commits()]
        for _ in range(2):
            with pytest.raises(BrokenLog, match="positions 3 to 4") as broken:
                await mailbox.retention.enforce_age()
            assert broken.value.position == 3
        assert [commit.first for commit in log.commits()][: len(before)] == before
        assert archive is None or archive.last_segment(MAILBOX) is None
        await mailbox.send_message(message(b"later"))
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"later"]
    async with place.open() as mailbox:
        assert mailbox.engine.mailbox.in_flight == 1


async def test_a_commit_that_was_altered_in_every_column_is_found(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(b"1"), message(b"2")])
        await mailbox.send_message(message(b"3"))
    for column in ("last", "epoch", "at", "chain", "events", "envelopes", "place"):
        value = place.value(3, column)
        altered = value + 1 if isinstance(value, int) else next(flipped(value))
        place.alter(3, column, altered)
        with pytest.raises(BrokenLog) as broken:
            place.verify()
        assert broken.value.position == 3, column


async def test_every_byte_of_a_commit_counts(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(b"1"), message(b"2", idem_key="key")])
    for column in ("last", "epoch", "at", "chain", "events", "envelopes"):
        value = place.value(3, column)
        for altered in [value + 1] if isinstance(value, int) else flipped(value):
            place.alter(3, column, altered)
            with pytest.raises(BrokenLog):
                place.verify()
        place.alter(3, column, value)
    place.verify()


def flipped(value: bytes) -> Iterator[bytes]:
    """Yield the bytes with one bit changed, for a part of their positions."""
    for index in range(0, len(value), max(1, len(value) // 24)):
        yield value[:index] + bytes([value[index] ^ 1 << index % 8]) + value[index + 1 :]


async def test_an_altered_message_is_quarantined_if_a_receive_before_its_own_decoded_its_commit(
    place: AlteredPlace,
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(payload) for payload in (PAYLOAD, b"other", b"third", b"fourth")])
    alter_first(place, 3, lambda envelope: envelope.replace(PAYLOAD, b"worthless"[:8]))
    async with place.open() as mailbox:
        payloads = [
            each.payload
            for _ in range(4)
            for each in await mailbox.receive_messages("orders", max_messages=1)
        ]
        assert payloads == [b"other", b"third", b"fourth"]
        assert [each.reason for each in (await mailbox.list_dead_letters()).items] == ["integrity"]
