"""Redrive jobs change what they selected, once each, and nothing besides, whatever happens meanwhile."""

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.messages import NewMessage
from postroom.domain.errors import IdempotencyConflict, InvalidRequest, NotFound
from postroom.domain.integrity import fingerprint
from postroom.domain.message import (
    MessageDeadLettered,
    MessageExpired,
    MessageRedriven,
    MessageRescheduled,
)
from postroom.domain.names import message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.subscription import SubscriptionFilter
from tests.support.redrives import (
    NAME,
    add_dead_letters,
    dead_ids,
    ended,
    log_of,
    owned,
    ready_ids,
    send,
)
from tests.support.waiting import until, until_answer

JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
IDS = [f"m{number}" for number in range(8)]


def changes(log: MemoryEventLog, kind: type = MessageRedriven) -> Counter[bytes]:
    return Counter(event.stream for _, event in log.replay() if type(event) is kind)


def streams(ids: list[str]) -> Counter[bytes]:
    return Counter(message_stream(NAME, each) for each in ids)


SELECTIONS: dict[str, tuple[RedriveSpec, list[str]]] = {
    "everything": (RedriveSpec(), ["a", "b", "c"]),
    "topic": (RedriveSpec(topics=("orders",)), ["a", "b"]),
    "glob": (RedriveSpec(topics=("ord*", "mail")), ["a", "b", "c"]),
    "reason": (RedriveSpec(reasons=("integrity",)), []),
    "fingerprint": (RedriveSpec(fingerprints=(fingerprint("max_attempts", "code 500"),)), ["b"]),
    "id": (RedriveSpec(message_ids=("a", "c", "missing")), ["a", "c"]),
    "header": (RedriveSpec(headers={"id": "b"}), ["b"]),
    "text": (RedriveSpec(text="ORDERS"), ["a", "b"]),
    "words of payloads": (RedriveSpec(match="c"), ["c"]),
    "time of the dead-lettering": (RedriveSpec(dead_until=0), []),
    "time of publication": (RedriveSpec(start_time=0), ["a", "b", "c"]),
    "limit": (RedriveSpec(limit=2), ["a", "b"]),
}


@pytest.mark.parametrize(("spec", "ids"), SELECTIONS.values(), ids=SELECTIONS)
async def test_a_job_redrives_what_its_filter_selects_as_its_preview_says(
    spec: RedriveSpec, ids: list[str]
) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, ["a"], error="gone")
        await add_dead_letters(mailbox, ["b"], error="code 404")
        await add_dead_letters(mailbox, ["c"], topic="mail")
        preview = await mailbox.preview_redrive(spec)
        assert (preview.matched, [each.message_id for each in preview.samples]) == (len(ids), ids)
        assert sum(each.count for each in preview.groups) == len(ids)
        job = await ended(mailbox, await mailbox.start_redrive(spec))
        assert (job.status, job.matched, job.moved, job.skipped) == ("completed", len(ids), len(ids), 0)
        assert changes(log) == streams(ids)
        assert await dead_ids(mailbox) == sorted({"a", "b", "c"} - {*ids})


async def test_undoing_survives_a_crash_after_each_of_its_commits() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await ended(mailbox, await mailbox.start_redrive(RedriveSpec()))
        received = (await mailbox.receive_messages("orders", max_messages=2))[:2]
        before = len(list(log.commits()))
        await ended(mailbox, await mailbox.change_redrive(job.job_id, "undo"))
        commits = list(log.commits())
    taken = {each.message_id for each in received}
    for end in range(before + 1, len(commits) + 1):
        rest = log_of(commits[:end])
        async with owned(rest) as mailbox:
            report = await ended(mailbox, job)
            assert (report.status, report.restored, report.retained) == ("undone", len(IDS) - 2, 2)
            assert changes(rest, MessageDeadLettered) == streams(IDS) + streams(sorted({*IDS} - taken))
            assert await dead_ids(mailbox) == sorted({*IDS} - taken)


async def test_failures_after_the_start_never_join() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec())
        await add_dead_letters(mailbox, ["late"])
        await mailbox.redrive_dead_letters("orders", message_ids=["m0"])  # it fails again
        received = await mailbox.receive_messages("orders")
        await mailbox.nack_messages([each.receipt for each in received], reason="boom")
    async with owned(log_of(list(log.commits()))) as mailbox:
        report = await ended(mailbox, job)
        assert (report.matched, report.moved, report.skipped) == (len(IDS), len(IDS) - 1, 1)
        assert await dead_ids(mailbox) == ["late", "m0"]


@pytest.mark.parametrize("limit", [None, 5])
async def test_each_selected_message_has_one_outcome_though_its_owner_is_killed_when_others_settle_it(
    limit: int | None,
) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec(limit=limit))
        await mailbox.redrive_dead_letters("orders", message_ids=["m0", "m3"])
        received = await mailbox.receive_messages("orders", max_messages=2)
        await mailbox.ack_messages([each.receipt for each in received])
    async with owned(log_of(list(log.commits()))) as mailbox:
        report = await ended(mailbox, job)
        assert report.matched == (limit or len(IDS)) == report.moved + report.skipped
        messages = (await mailbox.list_redrive_messages(job.job_id)).items
        assert len({each.message_id for each in messages}) == len(messages) == report.matched
        if limit is None:
            assert [each.message_id for each in messages if each.reason == "settled"] == ["m0", "m3"]


@pytest.mark.parametrize(("action", "reason"), [("archive", "archived"), ("purge", "purged")])
async def test_a_job_archives_or_purges_what_it_selects(action: Any, reason: str) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, IDS)
        spec = RedriveSpec(action=action, headers={"id": "m3"})
        job = await ended(mailbox, await mailbox.start_redrive(spec))
        assert changes(log, MessageExpired) == streams(["m3"])
        assert {event.reason for _, event in log.replay() if isinstance(event, MessageExpired)} == {reason}
        with pytest.raises(InvalidRequest, match=f"is to {action} messages, which can't be undone"):
            await mailbox.change_redrive(job.job_id, "undo")


async def test_a_job_leaves_a_tenth_of_each_shard_to_senders_and_goes_on_when_there_is_room() -> None:
    policy = TopicPolicy(max_attempts=1, shards=1, shard_capacity=10)
    async with owned(MemoryEventLog(NAME), policy=policy) as mailbox:
        await add_dead_letters(mailbox, IDS)
        await add_dead_letters(mailbox, ["x1", "x2", "x3", "x4"])
        job = await mailbox.start_redrive(RedriveSpec())
        await until(lambda: len(mailbox.engine.mailbox.topics["orders"].dead) == 3)
        await mailbox.send_message(NewMessage(topic="orders", payload=b"new"))
        received = await mailbox.receive_messages("orders", max_messages=10)
        await mailbox.ack_messages([each.receipt for each in received])
        assert (await ended(mailbox, job)).moved == 12


async def test_a_job_is_paused_resumed_and_cancelled() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec(rate=1), principal="ops")
        assert job.principal == "ops"
        for _ in range(2):  # repeating it changes nothing
            assert (await mailbox.change_redrive(job.job_id, "pause")).status == "paused"
        for _ in range(2):
            assert (await mailbox.change_redrive(job.job_id, "resume")).status == "running"
        report = await mailbox.change_redrive(job.job_id, "cancel")
        assert report.status == "cancelled"
        with pytest.raises(InvalidRequest, match="is cancelled, so it can't resume"):
            await mailbox.change_redrive(job.job_id, "resume")
        await asyncio.sleep(0.05)
        assert (await mailbox.get_redrive(job.job_id)).moved == report.moved
        assert [each.job_id for each in await mailbox.list_redrives()] == [job.job_id]


async def test_a_running_job_is_undone() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec(rate=20))

        async def has_begun() -> bool:
            return (await mailbox.get_redrive(job.job_id)).moved > 0

        await until_answer(has_begun)
        await mailbox.change_redrive(job.job_id, "undo")
        report = await ended(mailbox, job)
        assert (report.status, report.restored) == ("undone", report.moved)
        assert await dead_ids(mailbox) == IDS


async def test_the_history_of_a_message_names_the_jobs_that_changed_it() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["a", "b"])
        await mailbox.redrive_dead_letters("orders", message_ids=["a"])
        await add_dead_letters(mailbox, ["c"])
        job = await ended(mailbox, await mailbox.start_redrive(RedriveSpec()))
        await mailbox.change_redrive(job.job_id, "undo")
        await ended(mailbox, job)
        purge = await ended(mailbox, await mailbox.start_redrive(RedriveSpec(action="purge", limit=1)))
        for id_, jobs in (("a", [job, job]), ("b", [job, job, purge]), ("c", [job, job])):
            history = (await mailbox.get_message(id_)).history
            named = [each.facts["redrive_job"] for each in history if "redrive_job" in each.facts]
            assert named == [each.job_id for each in jobs]


WAITING: dict[str, tuple[RedriveSpec, list[str]]] = {
    "everything": (RedriveSpec(), ["a", "b", "c"]),
    "glob": (RedriveSpec(topics=("ord*",)), ["a", "b"]),
    "key": (RedriveSpec(keys=("k", "other")), ["b", "c"]),
    "id": (RedriveSpec(message_ids=("a", "c", "missing")), ["a", "c"]),
    "header": (RedriveSpec(headers={"id": "b"}), ["b"]),
    "words of payloads": (RedriveSpec(match="payload-c"), ["c"]),
    "time of publication": (RedriveSpec(end_time=0), []),
    "limit": (RedriveSpec(limit=2), ["a", "b"]),
}


@pytest.mark.parametrize(("spec", "ids"), WAITING.values(), ids=WAITING)
@pytest.mark.parametrize("action", ["cancel", "reschedule"])
async def test_a_job_changes_what_waits_as_its_preview_says(
    spec: RedriveSpec, ids: list[str], action: Any
) -> None:
    log = MemoryEventLog(NAME)
    spec = msgspec.structs.replace(spec, action=action, delay_ms=5 if action == "reschedule" else 0)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, ["dead"])
        for id_, topic, key in (("a", "orders", None), ("b", "orders", "k"), ("c", "mail", "k")):
            payload = f"payload-{id_}".encode()
            await mailbox.send_message(
                NewMessage(topic, payload, message_id=id_, attrs={"id": id_}, sticky_key=key)
            )
        preview = await mailbox.preview_redrive(spec)
        assert (preview.matched, [each.message_id for each in preview.samples]) == (len(ids), ids)
        job = await ended(mailbox, await mailbox.start_redrive(spec, principal="ops"))
        assert (job.status, job.matched, job.moved, job.skipped) == ("completed", len(ids), len(ids), 0)
        kind = MessageExpired if action == "cancel" else MessageRescheduled
        assert changes(log, kind) == streams(ids)
        assert {event.principal for _, event in log.replay() if isinstance(event, kind)} <= {"ops"}
        assert await dead_ids(mailbox) == ["dead"]
        with pytest.raises(InvalidRequest, match=f"is to {action} messages, which can't be undone"):
            await mailbox.change_redrive(job.job_id, "undo")


async def test_a_job_tells_why_it_left_what_waited() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await send(mailbox, ["acked", "dead", "flying"])
        await mailbox.send_message(NewMessage("orders", b"x", message_id="short", ttl_seconds=600))
        job = await mailbox.start_redrive(RedriveSpec(action="reschedule", delay_ms=3_600_000, rate=1))
        await mailbox.change_redrive(job.job_id, "pause")
        await until_answer(lambda: _has_status(mailbox, job.job_id, "paused"))
        taken = {each.message_id: each for each in await mailbox.receive_messages("orders", max_messages=3)}
        await taken["acked"].ack()
        await taken["dead"].reject()
        await mailbox.change_redrive(job.job_id, "resume")
        report = await ended(mailbox, job)
        assert (report.matched, report.moved, report.skipped) == (4, 0, 4)
        skipped = (await mailbox.list_redrive_messages(job.job_id, outcome="skipped")).items
        assert {each.message_id: each.reason for each in skipped} == {
            "acked": "settled",
            "dead": "dead",
            "flying": "in_flight",
            "short": "expires_first",
        }


async def _has_status(mailbox: OwnedMailbox, job: str, status: str) -> bool:
    return (await mailbox.get_redrive(job)).status == status


async def test_a_cancelled_message_lets_its_ordered_key_go_on_and_frees_its_unique_key() -> None:
    policy = TopicPolicy(ordered_keys=True)
    async with owned(MemoryEventLog(NAME), policy=policy) as mailbox:
        first = NewMessage("orders", b"1", message_id="1", sticky_key="k", unique_key="u", attrs={"id": "1"})
        await mailbox.send_message(first)
        await mailbox.send_message(NewMessage("orders", b"2", message_id="2", sticky_key="k"))
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"1"]
        await ended(mailbox, await mailbox.start_redrive(RedriveSpec(action="cancel", headers={"id": "1"})))
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"2"]
        again = await mailbox.send_message(NewMessage("orders", b"3", sticky_key="k", unique_key="u"))
        assert not again.duplicate


async def test_a_job_cancels_the_copies_of_a_subscription_and_not_their_originals() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
        await send(mailbox, ["a", "b"])
        spec = RedriveSpec(action="cancel", topics=("mail",), headers={"id": "a"})
        assert (await ended(mailbox, await mailbox.start_redrive(spec))).moved == 1
        assert len(await mailbox.peek_messages("mail")) == 1
        assert await ready_ids(mailbox) == ["a", "b"]


async def test_only_a_job_with_words_reads_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    log = MemoryEventLog(NAME)
    read: list[bool] = []
    async with owned(log, is_running=False) as mailbox:
        await send(mailbox, ["a", "b"])
        commits_of = MemoryEventLog.commits_of

        def watched(log: MemoryEventLog, positions: Iterable[int], *, envelopes: bool = True) -> Any:
            read.append(envelopes)
            return commits_of(log, positions, envelopes=envelopes)

        monkeypatch.setattr(MemoryEventLog, "commits_of", watched)
        spec = RedriveSpec(action="cancel", headers={"id": "a"})
        await mailbox.start_redrive(spec)
        assert read == [False]
        await mailbox.start_redrive(msgspec.structs.replace(spec, match="a"))
        assert read == [False, True]


async def test_redriven_messages_are_delayed() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["a"])
        await ended(mailbox, await mailbox.start_redrive(RedriveSpec(delay_ms=60_000)))
        assert await ready_ids(mailbox) == []
        assert (await mailbox.get_message("a")).status == "delayed"


async def test_starting_a_job_again_with_its_id_changes_nothing() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["a"])
        first = await ended(mailbox, await mailbox.start_redrive(RedriveSpec(), job_id=JOB))
        await add_dead_letters(mailbox, ["b"])
        assert await mailbox.start_redrive(RedriveSpec(), job_id=JOB) == first
        with pytest.raises(IdempotencyConflict, match="exists with another specification"):
            await mailbox.start_redrive(RedriveSpec(limit=1), job_id=JOB)
        assert await dead_ids(mailbox) == ["a", "b"]  # it failed again


async def test_unknown_jobs_are_not_there() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        with pytest.raises(NotFound, match=f"no redrive job {JOB}"):
            await mailbox.get_redrive(JOB)
        with pytest.raises(NotFound):
            await mailbox.change_redrive(JOB, "undo")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"topics": 5}, "Expected `array`"),
    "action": ({"action": "move"}, "Invalid enum value"),
    "surrogate": ({"reasons": ("\ud800",)}, "surrogate"),
    "rate": ({"rate": 0}, "rate must be at least 1"),
    "limit": ({"limit": 0}, "limit must be at least 1"),
    "delay": ({"delay_ms": -1}, "delay_ms must be at least 0"),
    "delay of a purge": ({"delay_ms": 1, "action": "purge"}, "leave it out of action purge"),
    "reasons of what waits": (
        {"action": "cancel", "reasons": ("rejected",)},
        "reasons applies to dead letters; leave it out of action cancel, which changes messages that wait",
    ),
    "time of dead letters": ({"action": "reschedule", "dead_since": 0}, "dead_since applies to dead letters"),
    "copies of what waits": ({"action": "cancel", "destination": "x"}, "leave them out of action cancel"),
    "delay of a cancellation": ({"action": "cancel", "delay_ms": 1}, "leave it out of action cancel"),
    "time of a cancellation": ({"action": "cancel", "at": 1}, "at belongs to action reschedule"),
    "note of a redrive": ({"note": "x"}, "note belongs to action cancel; leave it out of action redrive"),
    "statuses of a redrive": ({"statuses": ("ready",)}, "statuses apply to messages that wait"),
    "in flight to be rescheduled": (
        {"action": "reschedule", "statuses": ("in_flight",)},
        "in flight can't be rescheduled",
    ),
    "status": ({"action": "cancel", "statuses": ("acked",)}, "Invalid enum value"),
    "two times": ({"action": "reschedule", "at": 1, "delay_ms": 1}, "leave out one of them"),
    "distant time": ({"action": "reschedule", "at": 1 << 50}, "at must be within"),
    "ids": ({"message_ids": ("a",) * 1_001}, "at most 1000"),
    "values": ({"reasons": ("a",) * 101}, "at most 100"),
    "filter": ({"start_time": 2, "end_time": 1}, "swap them"),
    "time": ({"dead_since": 1 << 70}, "dead_since"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
async def test_a_wrong_specification_is_refused(fields: dict[str, Any], message: str) -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        for call in (mailbox.start_redrive, mailbox.preview_redrive):
            with pytest.raises(InvalidRequest, match=message):
                await call(RedriveSpec(**fields))
