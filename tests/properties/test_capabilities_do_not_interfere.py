"""Two capabilities on disjoint topics: no answer to one depends on what the other did, whatever both call.

Positions, cursors and times are left out: they are of the whole log (docs/capabilities.md).
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from postroom.application.access.guard import Guard
from postroom.application.mailbox import message_factory
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.capability.rights import Topics
from postroom.domain.errors import PostroomError
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter
from tests.support.access import MemoryPlace, controlled_mailbox, mailbox_of
from tests.support.examples import examples
from tests.support.messages import message

TOPICS = ("a.x", "a.y", "b.x", "b.z", "other")
UUID = "0190f5e2-7c4f-7000-8000-00000000000{}"
IDS = ("order-9", "order-8", UUID.format(1), UUID.format(2))
JOBS = (UUID.format(3), UUID.format(4))
PAYLOADS = (b"4711", b"0815")
MAX_STEPS = 12


class Step(NamedTuple):
    """A call of one of the two capabilities, with every argument that it may use."""

    bearer: str
    call: str
    topic: str
    id: str
    job: str
    payload: bytes


Call = Callable[["Bearer", Step], Awaitable[object]]


class Bearer:
    """The bearer of a capability, and what it received."""

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self.receipts: list[Receipt] = []
        self.jobs: dict[str, str] = {}

    async def receive(self, step: Step) -> list[ReceivedMessage]:
        received = await self.mailbox.receive_messages(step.topic, max_messages=1)
        self.receipts += [each.receipt for each in received]
        return received

    async def start(self, step: Step) -> object:
        spec = RedriveSpec(topics=(step.topic,), message_ids=(step.id,))
        report = await self.mailbox.start_redrive(spec, job_id=step.job)
        self.jobs[step.job] = report.job_id
        while report.is_active:
            await asyncio.sleep(0)
            report = await self.mailbox.get_redrive(report.job_id)
        return report

    def job(self, step: Step) -> str:
        return self.jobs.get(step.job, step.job)


CALLS: dict[str, Call] = {
    "send": lambda b, s: b.mailbox.send_message(message(s.payload, s.topic, message_id=s.id)),
    "send with a key": lambda b, s: b.mailbox.send_message(message(s.payload, s.topic, idem_key=s.id)),
    "send batch": lambda b, s: b.mailbox.send_batch(
        [message(s.payload, each, message_id=s.id) for each in TOPICS]
    ),
    "receive": lambda b, s: b.receive(s),
    "receive of all": lambda b, s: b.mailbox.receive_messages(list(TOPICS)),
    "ack": lambda b, s: b.mailbox.ack_messages(b.receipts),
    "nack": lambda b, s: b.mailbox.nack_messages(b.receipts, reason="broken", delay_ms=0),
    "extend": lambda b, s: b.mailbox.extend_visibility(b.receipts, 60_000),
    "redrive": lambda b, s: b.mailbox.redrive_dead_letters(s.topic),
    "redrive of ids": lambda b, s: b.mailbox.redrive_dead_letters(s.topic, message_ids=[s.id]),
    "purge": lambda b, s: b.mailbox.purge_topic(s.topic, ready=True),
    "policy": lambda b, s: b.mailbox.set_topic_policy(s.topic, TopicPolicy(max_attempts=1)),
    "pause": lambda b, s: b.mailbox.pause_topic(s.topic),
    "resume": lambda b, s: b.mailbox.resume_topic(s.topic),
    "delete": lambda b, s: b.mailbox.delete_old_events(1 << 60),
    "get": lambda b, s: b.mailbox.get_message(s.id),
    "explain": lambda b, s: b.mailbox.explain_message(s.id),
    "backlog": lambda b, s: b.mailbox.get_backlog(s.topic),
    "backlog of all": lambda b, s: b.mailbox.get_backlog(),
    "dead letters": lambda b, s: b.mailbox.list_dead_letters(s.topic),
    "dead letters of all": lambda b, s: b.mailbox.list_dead_letters(),
    "get policy": lambda b, s: b.mailbox.get_topic_policy(s.topic),
    "topics": lambda b, s: b.mailbox.list_topics(),
    "peek": lambda b, s: b.mailbox.peek_messages(s.topic),
    "search": lambda b, s: b.mailbox.search_messages(EventFilter(topics=(s.topic,), limit=2)),
    "search of an id": lambda b, s: b.mailbox.search_messages(
        EventFilter(topics=(s.topic,), message_id=s.id)
    ),
    "preview a redrive": lambda b, s: b.mailbox.preview_redrive(
        RedriveSpec(topics=(s.topic,), message_ids=(s.id,))
    ),
    "start a redrive": lambda b, s: b.start(s),
    "redrives": lambda b, s: b.mailbox.list_redrives(),
    "get a redrive": lambda b, s: b.mailbox.get_redrive(b.job(s)),
    "messages of a redrive": lambda b, s: b.mailbox.list_redrive_messages(b.job(s)),
    "cancel a redrive": lambda b, s: b.mailbox.change_redrive(b.job(s), "cancel"),
    "undo a redrive": lambda b, s: b.mailbox.change_redrive(b.job(s), "undo"),
}
STEPS = st.lists(
    st.builds(
        Step,
        st.sampled_from("ab"),
        st.sampled_from(sorted(CALLS)),
        st.sampled_from(TOPICS),
        st.sampled_from(IDS),
        st.sampled_from(JOBS),
        st.sampled_from(PAYLOADS),
    ),
    max_size=MAX_STEPS,
)
SCOPES: tuple[list[tuple[str, ...]], ...] = ([("a.*",), ("b.*",)], [("a.x", "other"), ("a.y", "b.*")])

_OF_THE_LOG = {"position", "ended_position", "cutoff", "at", "as_of", "next_cursor"}
_RANDOM = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4}){3}-?[0-9a-f]{12}")


def view(answer: Any) -> Any:
    """Return an answer without what is of the whole log."""
    match answer:
        case ReceivedMessage():
            return view(answer.delivery)
        case PostroomError():
            return type(answer).__name__, str(answer), getattr(answer, "retry_after_ms", None)
        case msgspec.Struct():
            return {
                name: view(getattr(answer, name))
                for name in answer.__struct_fields__
                if name not in _OF_THE_LOG
            }
        case Mapping():
            return {name: view(each) for name, each in answer.items() if name not in _OF_THE_LOG}
        case list() | tuple():
            return [view(each) for each in answer]
        case bytes():
            return answer.hex() if len(answer) == 16 else _RANDOM.sub("", answer.decode("latin-1"))
        case _:
            return answer


def views(answers: list[Any]) -> Iterator[str]:
    """Yield answers in which ids that were made at random are numbered by their first occurrence."""
    names: dict[str, str] = {}
    for answer in answers:
        yield _RANDOM.sub(
            lambda match: (
                names.setdefault(match[0].replace("-", ""), f"id {len(names)}")
                if match[0] not in IDS
                else match[0]
            ),
            repr(view(answer)),
        )


async def prepare(place: MemoryPlace) -> None:
    """Give each topic a dead letter and a ready message, which an unlimited sender sent."""
    for topic in TOPICS:
        await place.mailbox.set_topic_policy(topic, TopicPolicy(max_attempts=1))
        for number in range(2):
            await place.mailbox.send_message(message(b"%d" % number, topic, message_id=f"{topic}-{number}"))
        (dead,) = await place.mailbox.receive_messages(topic, max_messages=1)
        await place.mailbox.nack_messages([dead.receipt], reason="prepared")


async def answers_to_a(scopes: list[tuple[str, ...]], steps: list[Step], *, with_b: bool) -> list[str]:
    async with controlled_mailbox() as place:
        await prepare(place)
        bearers = {
            name: Bearer(await mailbox_of(place, Topics(topics), principal=name))
            for name, topics in zip("ab", scopes, strict=True)
        }
        answers: list[Any] = []
        for step in steps:
            if step.bearer == "b" and not with_b:
                continue
            try:
                answer: Any = await CALLS[step.call](bearers[step.bearer], step)
            except PostroomError as error:
                answer = error
            if step.bearer == "a":
                answers.append((step, answer))
        return list(views(answers))


def check(scopes: list[tuple[str, ...]], steps: list[Step]) -> None:
    alone = asyncio.run(answers_to_a(scopes, steps, with_b=False))
    assert asyncio.run(answers_to_a(scopes, steps, with_b=True)) == alone


def steps_of(*calls: tuple[str, str, str]) -> list[Step]:
    """Return steps from bearers, calls and topics, with the first of the ids, jobs and payloads."""
    return [Step(*each, IDS[0], JOBS[0], PAYLOADS[0 if each[0] == "a" else 1]) for each in calls]


SAME_ID = steps_of(("b", "send", "b.x"), ("a", "send", "a.x"), ("a", "get", "a.x"))
SAME_JOB = steps_of(("b", "start a redrive", "b.x"), ("a", "start a redrive", "a.x"))
UNKNOWN_TOPIC = steps_of(("b", "send", "b.new"), ("a", "pause", "a.new"))


@given(scopes=st.sampled_from(SCOPES), steps=STEPS)
@example(scopes=SCOPES[0], steps=SAME_ID)
@example(scopes=SCOPES[0], steps=SAME_JOB)
@example(scopes=SCOPES[0], steps=UNKNOWN_TOPIC)
@settings(max_examples=examples(60))
def test_no_answer_to_a_capability_depends_on_what_one_of_other_topics_did(
    scopes: list[tuple[str, ...]], steps: list[Step]
) -> None:
    check(scopes, steps)


def test_the_property_notices_ids_that_cross_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_factory, "is_limited", lambda: False)
    with pytest.raises(AssertionError):
        check(SCOPES[0], SAME_ID)


def test_the_property_notices_a_guard_that_covers_every_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Guard, "covers", lambda self, topic: True)
    with pytest.raises(AssertionError):
        check(SCOPES[0], steps_of(("b", "send", "b.x"), ("a", "topics", "a.x")))
