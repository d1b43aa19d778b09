"""A bit flipped on disk is noticed before a caller of HTTP or gRPC gets the message."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring
from postroom.adapters.compose.remote import connect_remote
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

TIMEOUT_MS = 240_000
PAYLOAD = b"precious"


def flip_bit(store: str, payload: bytes) -> None:
    """Flip one bit of a payload in the store's file."""
    with closing(sqlite3.connect(store)) as connection, connection:
        rows = connection.execute("SELECT place, envelope FROM log WHERE envelope IS NOT NULL").fetchall()
        ((place, blob),) = [row for row in rows if payload in row[1]]
        index = blob.index(payload)
        altered = blob[:index] + bytes([blob[index] ^ 1]) + blob[index + 1 :]
        connection.execute("UPDATE log SET envelope = ? WHERE place = ?", (altered, place))


@pytest.mark.parametrize("protocol", ["http", "grpc"])
async def test_a_message_with_a_flipped_bit_is_quarantined_and_the_others_are_delivered(
    tmp_path: Path, protocol: str
) -> None:
    store = str(tmp_path / "store.db")
    with open_capabilities(store, open_key_ring(store)) as capabilities:
        capabilities.rotate()
        token = capabilities.issue("tester")
    async with open_mailbox(store, MAILBOX, durability="relaxed") as mailbox:
        altered = await mailbox.send_message(message(PAYLOAD))
        intact = await mailbox.send_message(message(b"other"))
    flip_bit(store, PAYLOAD)
    async with (
        open_mailbox(store, MAILBOX, durability="relaxed") as mailbox,
        open_access(store) as access,
        served(mailbox, protocol, access=access) as url,
        connect_remote(url, timeout_ms=TIMEOUT_MS, token=token) as client,
    ):
        peeked = {each.message_id: each.payload for each in await client.peek_messages("orders")}
        assert peeked == {altered.message_id: None, intact.message_id: b"other"}
        (received,) = await client.receive_messages("orders", visibility_ms=TIMEOUT_MS)
        assert (received.message_id, received.payload) == (intact.message_id, b"other")
        await received.ack()
        (letter,) = await client.list_dead_letters()
        assert (letter.message_id, letter.reason) == (altered.message_id, "integrity")
        assert not (await client.get_message(altered.message_id)).intact
        assert (await client.get_message(intact.message_id)).intact
        assert await client.receive_messages("orders") == []
