"""Readers of a mailbox use its log time, as its owner does, not the wall clock (svc-mailbox I-17)."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.queries import Reader
from tests.support.stores import Place, memory_place, message, sqlite_place

MINUTE = 60_000


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return memory_place() if request.param == "memory" else sqlite_place(tmp_path)


def set_back(place: Place) -> None:
    """Set the wall clock back by a day."""
    place.clock.wall_us -= 24 * 60 * MINUTE * 1_000


def set_ahead(place: Place) -> None:
    """Set the wall clock ahead by a day."""
    place.clock.wall_us += 24 * 60 * MINUTE * 1_000


async def check_agreement(place: Place, owner: OwnedMailbox, id_: str, status: str, text: str) -> None:
    """Check that a reader reports the owner's status of a message, as do its explanation and its backlog."""
    log = place.open_log()
    reader = Reader(log, place.clock)
    assert reader.get_message(id_).status == (await owner.get_message(id_)).status == status
    assert text in reader.explain_message(id_).now
    assert text in (await owner.explain_message(id_)).now
    assert reader.get_backlog().shards == (await owner.get_backlog()).shards
    log.close()


@pytest.mark.parametrize("jump", [set_back, set_ahead])
async def test_a_reader_sees_a_delay_end_when_the_owner_does(
    place: Place, jump: Callable[[Place], None]
) -> None:
    async with place.open() as owner:
        sent = await owner.send_message(message(deliver_after_ms=MINUTE))
        jump(place)
        await check_agreement(place, owner, sent.message_id, "delayed", "It is delayed")
        place.clock.advance(MINUTE)
        await check_agreement(place, owner, sent.message_id, "ready", "It has been ready")


async def test_a_reader_sees_a_visibility_timeout_end_when_the_owner_does(place: Place) -> None:
    async with place.open() as owner:
        sent = await owner.send_message(message())
        await owner.receive_messages("orders", visibility_ms=MINUTE)
        set_ahead(place)
        await check_agreement(place, owner, sent.message_id, "in_flight", "unless it is acked")


async def test_a_reader_knows_log_time_after_retention_removed_the_owners_record(place: Place) -> None:
    async with place.open() as owner:
        for _ in range(3):
            await owner.send_message(message())
        delivered = await owner.receive_messages("orders", max_messages=3)
        await owner.ack_messages([each.receipt for each in delivered])
        place.clock.advance(60 * MINUTE)
        sent = await owner.send_message(message(deliver_after_ms=MINUTE))
        place.clock.advance(1)
        assert await owner.delete_old_events(older_than=place.clock.wall_us) > 2
        set_ahead(place)
        await check_agreement(place, owner, sent.message_id, "delayed", "It is delayed")


async def test_after_a_reboot_a_reader_uses_the_wall_clock_as_the_next_owner_will(place: Place) -> None:
    async with place.open() as owner:
        sent = await owner.send_message(message(deliver_after_ms=MINUTE))
    place.clock.reboot(after_ms=2 * MINUTE)
    log = place.open_log()
    assert Reader(log, place.clock).get_message(sent.message_id).status == "ready"
    log.close()
