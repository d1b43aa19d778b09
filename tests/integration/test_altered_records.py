"""Records altered on disk are noticed: messages are quarantined, and a log that can't be folded is named."""

import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import BrokenLog
from tests.support.stores import Place, message, postgres_place, sqlite_place

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
        self._execute = execute

    def value(self, position: int, column: str) -> Any:
        """Return a column of the record at a position."""
        ((value,),) = self._execute(f"SELECT {column} FROM log WHERE place & 1099511627775 = ?", (position,))
        return value

    def alter(self, position: int, column: str, value: object) -> None:
        """Overwrite a column of the record at a position."""
        self._execute(f"UPDATE log SET {column} = ? WHERE place & 1099511627775 = ?", (value, position))

    def delete(self, position: int) -> None:
        """Delete the record at a position."""
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


ALTERATIONS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "the principal of the envelope": (
        "envelope",
        change(lambda envelope: setattr(envelope.security, "publisher_id", "mallory")),
    ),
    "the correlation id of the envelope": (
        "envelope",
        change(lambda envelope: setattr(envelope.metadata, "correlation_id", "c-2")),
    ),
    "the content type of the envelope": (
        "envelope",
        change(lambda envelope: setattr(envelope.metadata, "content_type", "text/html")),
    ),
    "the priority of the envelope": (
        "envelope",
        change(lambda envelope: setattr(envelope.metadata, "priority", 9)),
    ),
    "a field that we don't read": ("envelope", lambda blob: blob + b"\xfa\x3f\x03new"),
    "an envelope of junk": ("envelope", lambda blob: b"\xff\xff"),
    "no envelope": ("envelope", lambda blob: None),
    "the column of the principal": ("principal", lambda text: "mallory"),
    "the column of the message id": ("message_id", lambda text: "own-2"),
    "the column of custom headers": ("custom_headers", lambda text: '{"note":"other"}'),
    "custom headers that are no JSON": ("custom_headers", lambda text: "{"),
    "custom headers of numbers": ("custom_headers", lambda text: '{"note":1}'),
    "no custom headers": ("custom_headers", lambda text: None),
    "a state of another length": ("state", lambda state: b"\x90"),
    "a state of junk": ("state", lambda state: b"\xc1\xff"),
    "an empty state": ("state", lambda state: b""),
}


@pytest.mark.parametrize("alteration", ALTERATIONS)
async def test_an_altered_message_is_quarantined_and_the_others_are_delivered(
    place: AlteredPlace, alteration: str
) -> None:
    sent = {"principal": "alice", "correlation_id": "c-1", "content_type": "text/plain"}
    async with place.open() as mailbox:
        await mailbox.send_batch(
            [
                message(PAYLOAD, message_id="own-1", attrs={"note": "mine"}, **sent),
                message(b"other", message_id="own-3"),
            ]
        )
    column, alter = ALTERATIONS[alteration]
    place.alter(3, column, alter(place.value(3, column)))

    async with place.open() as mailbox:
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"other"]
        (letter,) = await mailbox.list_dead_letters()
        assert (letter.reason, letter.last_error) == ("integrity", "stored bytes do not match their hash")
        assert not (await mailbox.get_message("own-1")).intact
        assert (await mailbox.get_message("own-3")).intact
        assert (await mailbox.explain_message("own-1")).now
    async with place.open() as mailbox:
        assert [each.reason for each in await mailbox.list_dead_letters()] == ["integrity"]


@pytest.mark.parametrize("alteration", ALTERATIONS)
async def test_a_message_altered_while_its_mailbox_is_open_is_quarantined(
    place: AlteredPlace, alteration: str
) -> None:
    async with place.open(cache_bytes=0) as mailbox:
        await mailbox.send_message(message(PAYLOAD, message_id="own-1", attrs={"note": "mine"}))
        await mailbox.send_message(message(topic="others"))  # evicts the first from the cache
        column, alter = ALTERATIONS[alteration]
        place.alter(3, column, alter(place.value(3, column)))
        assert await mailbox.receive_messages("orders") == []
        assert [each.reason for each in await mailbox.list_dead_letters()] == ["integrity"]


async def test_an_unaltered_message_is_delivered_with_its_headers(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(
            message(PAYLOAD, attrs={"b": "2", "a": b"\xff", "c": "\U0001f4ee"}, correlation_id="c-1")
        )
    async with place.open() as mailbox:
        (received,) = await mailbox.receive_messages("orders")
        assert (received.payload, received.correlation_id) == (PAYLOAD, "c-1")
        assert received.attrs == {"b": "2", "a": "base64:/w==", "c": "\U0001f4ee"}


async def test_a_missing_record_in_the_middle_is_named_at_open(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_batch([message(bytes([n])) for n in range(5)])
    place.delete(5)
    with pytest.raises(BrokenLog, match="acme@one has no record at position 5, but one at 6") as broken:
        async with place.open():
            pytest.fail("opened a log with a gap")
    assert broken.value.position == 5


@pytest.mark.parametrize("state", [b"\xc1", b"", b"\x94\x01\x02\x03\x04"])
async def test_a_record_that_decides_about_the_mailbox_and_cannot_be_decoded_is_named_at_open(
    place: AlteredPlace, state: bytes
) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await mailbox.receive_messages("orders")
    place.alter(4, "state", state)
    with pytest.raises(BrokenLog, match=r"position 4 \(MessageReceived\.1\) can't be decoded") as broken:
        async with place.open():
            pytest.fail("opened a log that can't be decoded")
    assert broken.value.position == 4


async def test_a_record_that_contradicts_the_ones_before_is_named_at_open(place: AlteredPlace) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await mailbox.receive_messages("orders")
    place.alter(4, "stream", b"another message!")
    with pytest.raises(BrokenLog, match="position 4 can't be applied") as broken:
        async with place.open():
            pytest.fail("opened a log that can't be folded")
    assert broken.value.position == 4
