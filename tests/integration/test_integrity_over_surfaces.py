"""A bit flipped on disk is noticed before a caller of HTTP or gRPC gets the message."""

from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring
from postroom.adapters.compose.connect import connect_remote
from tests.support.altered_commits import alter
from tests.support.stores import MAILBOX, message
from tests.support.surfaces import served

TIMEOUT_MS = 240_000
PAYLOAD, FLIPPED = b"precious", b"qrecious"
"""They differ by one bit."""


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
    alter(
        store,
        "envelopes",
        lambda envelopes: envelopes.replace(PAYLOAD, FLIPPED),
    )
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
        (letter,) = (await client.list_dead_letters()).items
        assert (letter.message_id, letter.reason) == (altered.message_id, "integrity")
        assert not (await client.get_message(altered.message_id)).intact
        assert (await client.get_message(intact.message_id)).intact
        assert await client.receive_messages("orders") == []
