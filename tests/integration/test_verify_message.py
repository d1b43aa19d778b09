"""The hashes of one message and of its commits are computed again, and name what was altered."""

from collections.abc import Callable
from pathlib import Path

import pytest

from postroom.application.queries.get_message import MessageVerification, VerifyMessage
from postroom.domain.errors import BrokenLog, NotFound
from postroom.domain.policy import DAY_MS
from tests.support.altered_commits import Part, alter
from tests.support.stores import MAILBOX, Place, message, sqlite_place


async def write(place: Place) -> None:
    """Send and ack a message, which makes three commits, before and after those of others."""
    async with place.open() as mailbox:
        await mailbox.send_message(message(b"before", message_id="m-0"))
        await mailbox.send_message(message(b"precious", message_id="m-1", topic="mine", principal="alice"))
        (received,) = await mailbox.receive_messages("mine")
        await received.ack()
        await mailbox.send_message(message(b"after", message_id="m-2"))


def verify(place: Place, id_: str = "m-1") -> MessageVerification:
    log = place.open_log()
    try:
        return VerifyMessage(log)(id_)
    finally:
        log.close()


async def test_a_message_that_was_not_altered_is_intact(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    await write(place)
    verification = verify(place)
    assert verification.is_intact
    assert [each.name for each in verification.hashes] == ["envelope", "payload_hash", "hash_chain"]
    assert [each.matches for each in verification.commits] == [True, True, True]
    assert verification.commits[0].chain == verification.commits[1].previous
    assert verification.omitted == 0


@pytest.mark.parametrize(
    ("part", "before", "after", "hashes", "commits"),
    [
        ("envelopes", b"precious", b"preciouz", [False, False, False], [True, True, True]),
        ("envelopes", b"mine", b"mind", [False, True, True], [True, True, True]),
        ("events", b"alice", b"allie", [True, True, True], [False, True, True]),
    ],
    ids=["payload", "topic-of-the-envelope", "header-in-the-log"],
)
async def test_what_was_altered_does_not_match(
    tmp_path: Path, part: Part, before: bytes, after: bytes, hashes: list[bool], commits: list[bool]
) -> None:
    place = sqlite_place(tmp_path)
    await write(place)
    alter(tmp_path / "store.db", part, _replace(before, after))
    verification = verify(place)
    assert not verification.is_intact
    assert [each.matches for each in verification.hashes] == hashes
    assert [each.matches for each in verification.commits] == commits
    assert verify(place, "m-2").is_intact


async def test_an_envelope_that_can_not_be_read_has_no_hash_of_a_payload(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    await write(place)
    alter(tmp_path / "store.db", "envelopes", lambda stored: b"\xc1" + stored if stored else stored)
    verification = verify(place)
    assert not verification.is_intact
    assert not verification.headers_match


async def test_events_that_can_not_be_decoded_are_named(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    await write(place)
    alter(tmp_path / "store.db", "events", _replace(b"MessageAcked", b"MessageAckef"))
    with pytest.raises(BrokenLog):
        verify(place)


async def test_a_commit_whose_predecessor_was_removed_is_not_known_to_match(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    async with place.open() as mailbox:
        await mailbox.send_message(message(b"old", message_id="m-0", topic="old"))
        (received,) = await mailbox.receive_messages("old")
        await received.ack()
        place.clock.advance(2 * DAY_MS)
        await mailbox.send_message(message(b"new", message_id="m-1"))
        await mailbox.delete_old_events(place.clock.wall() - 1)
    verification = verify(place)
    assert verification.is_intact
    assert verification.commits[0].previous is None
    assert verification.commits[0].matches is None
    with pytest.raises(NotFound, match=f"Mailbox {MAILBOX} has no message m-0"):
        verify(place, "m-0")


def _replace(before: bytes, after: bytes) -> Callable[[bytes], bytes]:
    return lambda stored: stored.replace(before, after)
