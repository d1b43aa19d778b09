"""Redrive jobs that send copies: to another topic, or with other headers or payloads."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import uuid_utils
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.system.clock import SystemClock
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.reports import RedriveMessage, RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.commit import Commit
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.message import MessageExpired, MessageSent
from postroom.domain.names import message_stream
from postroom.domain.namespace import RESERVED_TOPIC
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.namespaces import open_namespace
from tests.support.redrives import NAME, add_dead_letters, ended, log_of, owned, ready_ids
from tests.support.waiting import until_answer

IDS = [f"m{number}" for number in range(7)]
TO_FIXED = RedriveSpec(topics=("orders",), destination="fixed")
EDIT = RedriveSpec(set_headers={"x": "1"})
ORDER = b'{"id": 7, "total": 1.10, "city": {"name": "Bonn", "zip": 53111}, "note": "x"}'


async def outcomes(
    mailbox: Mailbox, job: RedriveReport, limit: int = 2, **options: Any
) -> list[RedriveMessage]:
    messages: list[RedriveMessage] = []
    cursor = None
    while True:
        page = await mailbox.list_redrive_messages(job.job_id, cursor=cursor, limit=limit, **options)
        messages += page.items
        if (cursor := page.next_cursor) is None:
            return messages


async def finished(mailbox: Mailbox, job: RedriveReport) -> RedriveReport:
    async def is_idle() -> bool:
        return not (await mailbox.get_redrive(job.job_id)).is_active

    await until_answer(is_idle)
    return await mailbox.get_redrive(job.job_id)


async def reasons(mailbox: OwnedMailbox) -> dict[str, str]:
    return {each.message_id: each.reason for each in (await mailbox.list_dead_letters(limit=1_000)).items}


def copies(log: MemoryEventLog) -> Counter[bytes]:
    """Count the copies of each message, without those that were undone."""
    undone = {event.stream for _, event in log.replay() if isinstance(event, MessageExpired)}
    return Counter(
        message_stream(NAME, (event.headers.custom_headers or {})["id"])
        for _, event in log.replay()
        if isinstance(event, MessageSent) and not event.headers.message_id and event.stream not in undone
    )


async def test_a_job_sends_copies_to_another_topic_and_links_them_in_both_directions() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, IDS)
        await add_dead_letters(mailbox, ["other"], topic="mail")
        job = await ended(mailbox, await mailbox.start_redrive(TO_FIXED, principal="ops"))
        assert (job.status, job.matched, job.moved, job.skipped) == ("completed", 7, 7, 0)
        assert await reasons(mailbox) == {**dict.fromkeys(IDS, "replaced"), "other": "max_attempts"}
        received = await mailbox.receive_messages("fixed", max_messages=100)
        assert [each.causality_parent for each in received] == IDS
        assert [each.payload.decode() for each in received] == IDS
        done = await outcomes(mailbox, job)
        assert [(each.message_id, each.copy_id, each.topic, each.outcome) for each in done] == [
            (id_, copy.message_id, "orders", "redriven") for id_, copy in zip(IDS, received, strict=True)
        ]
        assert [each.status for each in done] == ["in_flight"] * len(IDS)  # of the copies
        await received[0].ack()
        await mailbox.nack_messages([received[1].receipt], action="reject")
        assert [each.status for each in await outcomes(mailbox, job)][:3] == ["acked", "dead", "in_flight"]
        original, copy = await mailbox.get_message("m3"), await mailbox.get_message(received[3].message_id)
        assert (original.status, original.reason, original.last_error) == ("dead", "replaced", "boom")
        links = original.history[-1].facts
        assert (links["redrive_job"], links["copy"]) == (job.job_id, received[3].message_id)
        links = copy.history[0].facts
        assert (links["redrive_job"], links["original"], copy.intact) == (job.job_id, "m3", True)
        assert "with a copy in its place" in (await mailbox.explain_message("m3")).now


async def test_a_copy_has_the_edits_and_the_original_stays_as_it_is() -> None:
    spec = RedriveSpec(
        set_headers={"reviewed": "yes", "raw": "base64:AP8="},
        remove_headers=("id", "unknown"),
        merge_patch='{"city": {"zip": null, "country": "DE"}, "note": null, "new": [1]}',
    )
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["a"], payload=ORDER)
        await ended(mailbox, await mailbox.start_redrive(spec))
        (copy,) = await mailbox.receive_messages("orders")
        assert copy.payload == (
            b'{"id":7,"total":1.10,"city":{"name":"Bonn","country":"DE"},"new":[1]}'
        )  # a number stays as it was written
        assert (copy.binary_attrs, copy.topic) == ({"reviewed": b"yes", "raw": b"\0\xff"}, "orders")
        before, after = await mailbox.get_message("a"), await mailbox.get_message(copy.message_id)
        assert before.item.reconstruct_envelope().payload.value == ORDER
        assert before.item.custom_headers == {"id": "a"}
        assert (before.intact, after.intact) == (True, True)
        await mailbox.ack_messages([copy.receipt])


@pytest.mark.parametrize(("spec", "signature"), [(TO_FIXED, b"s"), (EDIT, b"")], ids=["topic", "edit"])
async def test_a_copy_has_the_signature_unless_there_are_edits_but_never_the_secret(
    spec: RedriveSpec, signature: bytes
) -> None:
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id, envelope.metadata.topic = "signed", "orders"
    envelope.security.auth_token, envelope.security.signature = "secret", b"s"
    async with owned(MemoryEventLog(NAME)) as mailbox:
        factory = MessageFactory(NAME, SystemClock().wall, uuid_utils.uuid7)
        blob = envelope.SerializeToString()
        await mailbox.engine.submit([factory.from_envelope(blob, envelope).command])
        await add_dead_letters(mailbox, [])
        await ended(mailbox, await mailbox.start_redrive(spec))
        (copy,) = await mailbox.receive_messages([spec.destination or "orders"])
        security = PrismEnvelope.FromString(copy.envelope).security
        assert (copy.causality_parent, security.signature) == ("signed", signature)
        detail = await mailbox.get_message(copy.message_id)
        assert (b"secret" in detail.item.envelope_blob, detail.intact) == (False, True)


async def test_a_job_skips_what_it_cannot_edit_and_says_why() -> None:
    spec = RedriveSpec(merge_patch='{"pad": "' + "x" * 60_000 + '"}')
    large = b'{"body": "' + b"y" * 1_000_000 + b'"}'
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["text"])
        await add_dead_letters(mailbox, ["large"], payload=large)
        await add_dead_letters(mailbox, ["list"], payload=b"[1]")
        await add_dead_letters(mailbox, ["good"], payload=b"{}")
        await add_dead_letters(mailbox, ["broken"], payload=b'{"a": {"b": 1}')
        job = await ended(mailbox, await mailbox.start_redrive(spec))
        assert (job.moved, job.skipped) == (1, 4)
        skipped = {each.message_id: each.reason for each in await outcomes(mailbox, job, outcome="skipped")}
        wrong = dict.fromkeys(("text", "list", "broken"), "not_an_object")
        assert skipped == {**wrong, "large": "too_large"}
        assert [each.message_id for each in await outcomes(mailbox, job, outcome="redriven")] == ["good"]
        assert (await reasons(mailbox))["text"] == "max_attempts"


async def test_what_has_a_copy_is_redriven_again_only_if_its_reason_is_named() -> None:
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, ["a", "b", "c"])
        await ended(mailbox, await mailbox.start_redrive(TO_FIXED))
        assert (await mailbox.start_redrive(RedriveSpec())).matched == 0
        assert await mailbox.redrive_dead_letters("orders") == 0
        assert await mailbox.redrive_dead_letters("orders", reason="replaced", message_ids=["a"]) == 1
        again = RedriveSpec(reasons=("replaced",), message_ids=("b",))
        assert (await ended(mailbox, await mailbox.start_redrive(again))).moved == 1
        archive = RedriveSpec(action="archive")
        assert (await ended(mailbox, await mailbox.start_redrive(archive))).moved == 1
        assert await ready_ids(mailbox) == ["a", "b"]


async def test_two_jobs_on_the_same_messages_send_one_copy_of_each() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        jobs = [await mailbox.start_redrive(TO_FIXED) for _ in range(2)]
    async with owned(log_of(list(log.commits()))) as mailbox:
        reports = [await ended(mailbox, job) for job in jobs]
        assert sum(report.moved for report in reports) == len(IDS)
        assert copies(mailbox.engine.log) == Counter({message_stream(NAME, id_): 1 for id_ in IDS})  # type: ignore[arg-type]
        skipped = [each.reason for job in jobs for each in await outcomes(mailbox, job, outcome="skipped")]
        assert set(skipped) <= {"replaced"}


async def test_a_job_waits_for_room_at_its_destination_and_does_not_mind_a_pause() -> None:
    policy = TopicPolicy(max_attempts=1, shards=1, shard_capacity=4)
    async with owned(MemoryEventLog(NAME)) as mailbox:
        await add_dead_letters(mailbox, IDS[:4], payload=b"{}")
        await add_dead_letters(mailbox, ["text"])
        await add_dead_letters(mailbox, IDS[4:], payload=b"{}")
        await mailbox.set_topic_policy("fixed", policy)
        await mailbox.pause_topic("fixed")
        spec = RedriveSpec(topics=("orders",), destination="fixed", merge_patch="{}")
        job = await mailbox.start_redrive(spec)

        async def is_full() -> bool:
            return (await mailbox.get_redrive(job.job_id)).moved == 4

        await until_answer(is_full)
        await mailbox.resume_topic("fixed")
        received = await mailbox.receive_messages("fixed", max_messages=4)
        await mailbox.ack_messages([each.receipt for each in received])
        report = await ended(mailbox, job)
        assert (report.moved, report.skipped) == (len(IDS), 1)  # it met the text before and after it waited


@pytest.mark.parametrize(
    "spec", [TO_FIXED, RedriveSpec(topics=("orders",), set_headers={"x": "1"})], ids=["topic", "edit"]
)
async def test_a_job_that_sends_copies_survives_a_crash_after_each_of_its_commits(spec: RedriveSpec) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, IDS)
        before = len(list(log.commits()))
        job = await ended(mailbox, await mailbox.start_redrive(spec))
        commits = list(log.commits())
    for end in range(before + 1, len(commits) + 1):
        rest = log_of(commits[:end])
        async with owned(rest, batch=2) as mailbox:
            assert (await ended(mailbox, job)).moved == len(IDS)
            assert copies(rest) == Counter({message_stream(NAME, id_): 1 for id_ in IDS})


async def test_undoing_removes_the_copies_that_nobody_received_whenever_it_crashes() -> None:
    log = MemoryEventLog(NAME)
    async with owned(log) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await ended(mailbox, await mailbox.start_redrive(TO_FIXED))
        received = await mailbox.receive_messages("fixed", max_messages=2)
        await mailbox.redrive_dead_letters("orders", reason="replaced", message_ids=["m5", "m6"])
        for again in await mailbox.receive_messages("orders", max_messages=1):
            await again.nack(reason="again")  # m5
        before = len(list(log.commits()))
        await ended(mailbox, await mailbox.change_redrive(job.job_id, "undo"))
        commits = list(log.commits())
    kept = {str(each.causality_parent) for each in received} | {"m5", "m6"}
    for end in range(before + 1, len(commits) + 1):
        async with owned(log_of(commits[:end])) as mailbox:
            report = await ended(mailbox, job)
            assert (report.status, report.restored, report.retained) == ("undone", 3, 4)
            taken = dict.fromkeys(("m0", "m1"), "replaced")
            restored = dict.fromkeys(sorted({*IDS} - kept), "max_attempts")
            assert await reasons(mailbox) == {**taken, **restored, "m5": "max_attempts"}
            done = {each.message_id: each.outcome for each in await outcomes(mailbox, job)}
            assert done == {id_: "redriven" if id_ in kept else "undone" for id_ in IDS}
            assert len(await mailbox.peek_messages("fixed", limit=10)) == 2  # those of m5 and m6
            assert (await mailbox.get_message("m3")).history[-1].facts["redrive_job"] == job.job_id


async def test_the_messages_of_a_job_are_listed_with_their_outcomes() -> None:
    async with owned(MemoryEventLog(NAME), is_running=False) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await mailbox.start_redrive(RedriveSpec(action="archive"))
        assert await outcomes(mailbox, job) == []
        await mailbox.redrive_dead_letters("orders", message_ids=["m1"])
        log = mailbox.engine.log
    async with owned(log_of(list(log.commits()))) as mailbox:
        await ended(mailbox, job)
        done = {each.message_id: each.outcome for each in await outcomes(mailbox, job)}
        assert {id_ for id_, outcome in done.items() if outcome == "archived"} == {*IDS} - {"m1"}
        for wrong in ({"outcome": "lost"}, {"limit": 0}, {"limit": 1_001}, {"cursor": "x"}, {"cursor": 5}):
            with pytest.raises(InvalidRequest):
                await mailbox.list_redrive_messages(job.job_id, **wrong)


class SlowLog(MemoryEventLog):
    """A log that a job is ahead of."""

    def append(self, commits: Sequence[Commit]) -> None:
        time.sleep(0.02)
        super().append(commits)


async def test_the_messages_of_a_job_that_has_just_ended_are_all_listed() -> None:
    async with owned(SlowLog(NAME), batch=100) as mailbox:
        await add_dead_letters(mailbox, IDS)
        job = await finished(mailbox, await mailbox.start_redrive(TO_FIXED))
        assert len(await outcomes(mailbox, job, limit=100)) == len(IDS)


async def test_the_messages_of_a_job_in_a_namespace_are_listed_mailbox_by_mailbox() -> None:
    async with open_namespace("acme@a", "acme@b", "acme@c") as namespace:
        await namespace.set_topic_policy("orders", TopicPolicy(max_attempts=1))
        sent = [
            await namespace.send_message(NewMessage(topic="orders", payload=b"x", sticky_key=str(number)))
            for number in range(9)
        ]
        while received := await namespace.receive_messages("orders"):
            await namespace.nack_messages([each.receipt for each in received], reason="boom")
        job = await finished(namespace, await namespace.start_redrive(TO_FIXED))
        for limit in (1, 3, 4, 1_000):
            done = await outcomes(namespace, job, limit=limit)
            assert sorted(each.message_id for each in done) == sorted(each.message_id for each in sent)
        assert await outcomes(namespace, job, outcome="skipped") == []
        with pytest.raises(InvalidRequest, match="next_cursor"):
            await namespace.list_redrive_messages(job.job_id, cursor="acme@d 1.0")
        with pytest.raises(InvalidRequest, match="reserved"):
            await namespace.start_redrive(RedriveSpec(destination=RESERVED_TOPIC))


async def test_copies_need_a_capability_for_their_topic_and_their_edits_are_audited() -> None:
    spec = RedriveSpec(topics=("orders",), destination="fixed", set_headers={"x": "secret"})
    async with controlled_mailbox() as place:
        both = (Right.REDRIVE, Right.SEND)
        for operations, topics in ((both, ["orders"]), ((Right.REDRIVE,), ["orders", "fixed"])):
            mailbox = await mailbox_of(place, operations=operations, topics=topics)
            with pytest.raises(Forbidden):
                await mailbox.start_redrive(spec)
        mailbox = await mailbox_of(place, operations=both, topics=["orders", "fixed"])
        job = await mailbox.start_redrive(spec)
        limited = await mailbox_of(place, operations=(Right.REDRIVE,), topics=["orders"])
        assert (await limited.get_redrive(job.job_id)).spec == spec
        with pytest.raises(Forbidden):
            await limited.change_redrive(job.job_id, "undo")
        entry = next(each for each in place.audit.entries if each.outcome == "allowed")
        assert (entry.criteria, "secret" in repr(entry)) == (("destination", "set_headers"), False)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "topic": ({"destination": "a b"}, "Topic name"),
    "action": ({"destination": "a", "action": "purge"}, "leave them out of action purge"),
    "edit of an archive": ({"remove_headers": ("a",), "action": "archive"}, "leave them out"),
    "both": ({"set_headers": {"a": "1"}, "remove_headers": ("a",)}, "sets header a and removes it"),
    "base64": ({"set_headers": {"a": "base64:x"}}, "not base64"),
    "empty name": ({"set_headers": {"": "1"}}, "name of a header"),
    "size": ({"set_headers": {"a": "1" * 65_536}}, "at most 65536 bytes"),
    "patch": ({"merge_patch": "[1]"}, "no JSON object"),
    "broken patch": ({"merge_patch": '{"a": {"b": 1}'}, "no JSON object"),
    "depth": ({"merge_patch": '{"a":' * 200 + "1" + "}" * 200}, "up to 100 levels"),
    "type": ({"set_headers": {"a": 1}}, "Expected `str`"),
}


@pytest.mark.parametrize(("fields", "message"), WRONG.values(), ids=WRONG)
def test_wrong_edits_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        RedriveSpec(**fields).validate()


@given(
    steps=st.lists(
        st.sampled_from(["fail", "receive", "crash", "snapshot", "redrive", "copy", "undo"]), max_size=8
    ),
    count=st.integers(1, 5),
    batch=st.integers(1, 3),
)
def test_each_message_has_at_most_one_copy_and_comes_back_only_without_it(
    steps: list[str], count: int, batch: int
) -> None:
    asyncio.run(_run_steps(steps, IDS[:count], batch))


async def _run_steps(steps: list[str], ids: list[str], batch: int) -> None:
    log = MemoryEventLog(NAME)
    async with owned(log, is_running=False) as mailbox:
        await add_dead_letters(mailbox, ids)
        jobs = [await mailbox.start_redrive(TO_FIXED)]
    taken: set[str] = set()
    others: set[str] = set()
    for index, step in enumerate(steps):
        async with owned(log, batch=batch, is_running=step != "crash") as mailbox:
            match step:
                case "fail":
                    await add_dead_letters(mailbox, [f"new{index}"], topic="mail")
                case "receive":
                    received = await mailbox.receive_messages("fixed", max_messages=1)
                    taken |= {str(each.causality_parent) for each in received}
                case "snapshot":
                    await mailbox.engine.take_snapshot()
                case "redrive":
                    if await mailbox.redrive_dead_letters("orders", message_ids=[ids[-1]]):
                        others.add(ids[-1])
                case "copy":
                    jobs.append(await mailbox.start_redrive(TO_FIXED))
                case "undo":
                    await mailbox.change_redrive(jobs[0].job_id, "undo")
        log = log_of(list(log.commits()))
    async with owned(log, batch=batch) as mailbox:
        reports = [await ended(mailbox, job) for job in jobs]
        live = copies(log)
        assert set(live.values()) <= {1}
        dead = await reasons(mailbox)
        for id_ in ids:
            has_copy = live[message_stream(NAME, id_)] == 1
            assert has_copy == (dead.get(id_) == "replaced")
            assert has_copy or id_ not in taken
            assert has_copy or id_ in others or reports[0].status == "undone"
        assert sum(report.moved - report.restored for report in reports) == live.total()
