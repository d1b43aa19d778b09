"""What a mailbox is after a restart, a reboot, and a bit that was flipped on disk."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.application.messages import Sent
from postroom.domain.commit import Commit
from postroom.domain.errors import BrokenLog, StaleReceipt
from postroom.domain.policy import TopicPolicy
from tests.support.altered_commits import alter
from tests.support.stores import MAILBOX, Place, message, receive_one, sqlite_place

TOPIC = "orders"


async def test_after_a_restart_messages_are_delivered_from_the_log(place: Place) -> None:
    async with place.open() as mailbox:
        sent = await mailbox.send_message(message(b"\x00body", attrs={"k": "v"}, idem_key="k"))
        first = await receive_one(mailbox)
        await mailbox.nack_messages([first.receipt], reason="boom", delay_ms=0)
    async with place.open() as mailbox:
        second = await receive_one(mailbox)
        assert (second.message_id, second.attempt, second.payload) == (sent.message_id, 2, b"\x00body")
        assert (second.attrs, second.idem_key, second.receipt.epoch) == ({"k": "v"}, "k", 2)
        assert await mailbox.send_message(message(b"\x00body", idem_key="k")) == Sent(
            sent.message_id, duplicate=True
        )
        assert await mailbox.ack_messages([second.receipt]) == [None]
        assert (await mailbox.get_message(sent.message_id)).status == "acked"


async def test_a_delivery_goes_on_over_a_restart(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        first = await receive_one(mailbox)
    place.clock.advance(29_999)
    async with place.open() as mailbox:
        assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(1)
        assert (await receive_one(mailbox)).attempt == 2
        assert isinstance((await mailbox.ack_messages([first.receipt]))[0], StaleReceipt)


async def test_a_consumer_may_ack_to_the_next_owner(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        first = await receive_one(mailbox)
    async with place.open() as mailbox:
        assert await mailbox.ack_messages([first.receipt]) == [None]
    async with place.open() as mailbox:
        assert await mailbox.ack_messages([first.receipt]) == [None]  # settled long ago, it says so again


async def test_after_a_reboot_a_delivery_has_its_full_visibility_again(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
    place.clock.reboot(after_ms=60_000)
    async with place.open() as mailbox:
        place.clock.advance(29_999)
        assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(1)
        assert (await receive_one(mailbox)).attempt == 2


async def test_a_wall_clock_that_jumps_changes_no_deadline(place: Place) -> None:
    async with place.open() as mailbox:
        await mailbox.send_message(message())
        await receive_one(mailbox)
        for jump in (-119_000_000, 238_000_000, -86_400_000_000):
            place.clock.wall_us += jump
            assert await mailbox.receive_messages(TOPIC) == []
        place.clock.advance(30_000)
        assert (await receive_one(mailbox)).attempt == 2


async def test_dead_letters_outlive_a_restart(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    async with place.open(policy=TopicPolicy(max_attempts=1)) as mailbox:
        sent = await mailbox.send_message(message())
        await mailbox.nack_messages([(await receive_one(mailbox)).receipt], reason="boom")
        before = (await mailbox.list_dead_letters()).items
    async with place.open() as mailbox:
        assert (await mailbox.list_dead_letters()).items == before
        assert [(each.message_id, each.last_error) for each in before] == [(sent.message_id, "boom")]


async def test_a_message_that_outgrew_the_cache_is_read_from_the_log(place: Place) -> None:
    async with place.open(cache_bytes=1_000) as mailbox:
        await mailbox.send_batch([message(bytes([n]) * 600) for n in range(10)])
        received = await mailbox.receive_messages(TOPIC)
        assert [each.payload for each in received] == [bytes([n]) * 600 for n in range(10)]


async def test_a_message_whose_bytes_were_altered_is_quarantined_and_never_delivered(tmp_path: Path) -> None:
    place = sqlite_place(tmp_path)
    async with place.open() as mailbox:
        await mailbox.send_batch(
            [message(b"precious 1", message_id="m1"), message(b"precious 2", message_id="m2")]
        )
    flipped = b"qrecious 1"  # by one bit
    alter(tmp_path / "store.db", "envelopes", lambda stored: stored.replace(b"precious 1", flipped))
    async with place.open() as mailbox:
        assert [each.message_id for each in await mailbox.receive_messages(TOPIC)] == ["m2"]
        (letter,) = (await mailbox.list_dead_letters()).items
        assert (letter.message_id, letter.reason, letter.attempt) == ("m1", "integrity", 0)
        assert letter.last_error == "stored bytes do not match their hash"
        assert not (await mailbox.get_message("m1")).intact
        assert await mailbox.redrive_dead_letters(TOPIC) == 1
        assert await mailbox.receive_messages(TOPIC) == []
        assert [each.reason for each in (await mailbox.list_dead_letters()).items] == ["integrity"]
    broken = pytest.raises(BrokenLog, match="message at position 3 does not match its hash")
    with read_mailbox(str(tmp_path / "store.db"), MAILBOX) as reader, broken:
        reader.verify_log()


async def test_durability_is_what_was_asked_for(tmp_path: Path) -> None:
    for asked, said in (("full", "power-cut"), ("relaxed", "process-crash")):
        async with open_mailbox(str(tmp_path / f"{asked}.db"), durability=asked) as mailbox:  # type: ignore[arg-type]
            assert mailbox.engine.log.durability == said
    async with open_mailbox("memory:") as mailbox:
        assert mailbox.engine.log.durability == "nothing"


@pytest.mark.parametrize("received_at_once", [1, 100, 250])
async def test_consecutive_receives_read_a_commit_of_waiting_messages_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, received_at_once: int
) -> None:
    place = sqlite_place(tmp_path)
    count = 3 * received_at_once
    async with place.open() as mailbox:
        await mailbox.send_batch([message(str(n).encode()) for n in range(count)])
    read: list[int] = []

    def commits_of(log: SqliteEventLog, positions: Iterable[int], *, envelopes: bool = True) -> list[Commit]:
        commits = read_commits(log, positions, envelopes=envelopes)
        if envelopes:
            read.extend(commit.first for commit in commits)
        return commits

    read_commits = SqliteEventLog.commits_of
    async with place.open() as mailbox:
        monkeypatch.setattr(SqliteEventLog, "commits_of", commits_of)
        received = [
            each.payload
            for _ in range(3)
            for each in await mailbox.receive_messages(TOPIC, max_messages=received_at_once)
        ]
    assert received == [str(n).encode() for n in range(count)]
    assert read
    assert len(read) == len(set(read)), "a commit was read twice"
