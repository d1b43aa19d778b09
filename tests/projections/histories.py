"""Stores with a past: generated steps, taken through the public handlers under a clock that tests move."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.projections import open_updater, rebuild_projections
from postroom.adapters.compose.queries import open_target
from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import MessageResult, NewMessage
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.counts import TopicCount, count
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.names import message_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from postroom.projections import plan
from postroom.projections.follow import Follower
from postroom.projections.log_reader import Condition, LogExtent, LogReader, Range
from postroom.projections.plan import Plan, bucket_parts, log_parts
from postroom.projections.ports.read_model_store import ActiveVersion, Build, ReadModelStore, VerifiableStore
from postroom.projections.projection import Row, load_projections
from postroom.projections.rebuild import RebuildReport
from postroom.projections.tasks import RebuildTasks
from tests.projections.local_runner import LocalRunner
from tests.projections.reference import ReadModels, fold
from tests.support.clocks import ManualClock
from tests.support.steps import Operate, Wait

START_US = 1_750_000_000_000_000
POLICY = TopicPolicy(
    shards=2,
    visibility_ms=250,
    max_attempts=2,
    replay_window_ms=500,
    ready_retention_ms=60_000,
    dead_capacity=3,
)
POSITIONS, POSITIONS_PER_BUCKET, BUCKETS = 40, 60, 2
"""Sizes of parts and buckets: so small that most messages reach into several parts."""
TOPICS = ("admin.users.created", "admin.users.deleted", "shop", "Ünïcode.ÄRGER")


@dataclass(frozen=True)
class Send:
    message: NewMessage


@dataclass(frozen=True)
class Receive:
    topic: str


@dataclass(frozen=True)
class Settle:
    how: str
    which: int


@dataclass(frozen=True)
class Reopen:
    pass


Store = Path | str
"""Path of a SQLite store, or URL of another one."""

Step = Send | Receive | Settle | Operate | Wait | Reopen

_topics = st.sampled_from(TOPICS)
_word = st.sampled_from([None, "alice", "Bob", "STRASSE ß", "0f3a-77", "İstanbul"])
messages = st.builds(
    NewMessage,
    topic=_topics,
    payload=st.binary(max_size=20),
    attrs=st.dictionaries(
        st.sampled_from(["tenant", "Region", "x"]), st.sampled_from(["a", "EU-west", "ÅÄ"]), max_size=3
    ),
    deliver_after_ms=st.sampled_from([0, 0, 0, 400, 5_000]),
    ttl_seconds=st.sampled_from([0, 0, 0, 1]),
    published_at_us=st.none() | st.integers(START_US - 10_000_000, START_US + 10_000_000),
    content_type=st.sampled_from([None, "application/json"]),
    correlation_id=_word,
    principal=_word,
    trace_id=_word,
    schema_url=st.sampled_from([None, "https://example.org/schema"]),
)
steps: st.SearchStrategy[Step] = st.one_of(
    st.builds(Send, messages),
    st.builds(Send, messages),
    st.builds(Receive, _topics),
    st.builds(
        Settle, st.sampled_from(["ack", "nack", "nack", "extend", "reject", "release"]), st.integers(0, 5)
    ),
    st.builds(Operate, st.sampled_from(["redrive", "purge", "cancel", "reschedule", "subscribe"]), _topics),
    st.builds(Wait, st.sampled_from([1, 100, 300, 2_000])),
    st.builds(Reopen),
)

POISON: list[Step] = [
    Send(NewMessage(topic="shop", payload=b"x", message_id="order-1")),
    Receive("shop"),
    Settle("nack", 0),
    Receive("shop"),
    Settle("nack", 1),
]
"""A message that dies."""

STORY: list[Step] = [
    *POISON,
    Operate("redrive", "shop"),
    Receive("shop"),
    Settle("nack", 2),
    Wait(300),
    Receive("shop"),
    Settle("nack", 3),
    *(
        Send(NewMessage(topic=topic, payload=b"y", attrs={"tenant": "a"}, principal="alice"))
        for topic in TOPICS
    ),
    Receive("admin.users.created"),
    Settle("ack", 4),
    Receive("admin.users.deleted"),
    Settle("extend", 5),
    Send(NewMessage(topic="Ünïcode.ÄRGER", payload=b"z", ttl_seconds=1)),
    Send(NewMessage(topic="later", payload=b"z", deliver_after_ms=30_000)),
    Send(NewMessage(topic="redriven", payload=b"z")),
    Receive("redriven"),
    Settle("nack", 6),
    Wait(700),
    Receive("redriven"),
    Settle("nack", 7),
    Operate("redrive", "redriven"),
    Send(NewMessage(topic="purged", payload=b"z")),
    Receive("purged"),
    Settle("nack", 8),
    Wait(900),
    Receive("purged"),
    Settle("nack", 9),
    Operate("purge", "purged"),
    Send(NewMessage(topic="held", payload=b"z")),
    Receive("held"),
    Settle("extend", 10),
]
"""A mailbox in which a message stands everywhere it can, but for archived."""

VARIED: list[Step] = [
    Send(
        NewMessage(
            topic=TOPICS[number % 4],
            payload=b"",
            attrs={"tenant": "a" if number % 3 else "ÅÄ", **({"Region": "EU-west"} if number % 2 else {})},
            published_at_us=START_US + (number * 7 % 11 - 5) * 1_000_000,
            principal=("alice", "Bob", "STRASSE ß", None)[number % 5 % 4],
            correlation_id=("0f3a-77", None, "İstanbul")[number % 3],
            trace_id=("Bob", None)[number % 2],
        )
    )
    for number in range(40)
]
"""Messages with all sorts of headers, several with the same time."""


def live(store: Store, mailbox: str, taken: Sequence[Step], mode: MailboxMode = "queue") -> list[TopicCount]:
    """Take steps in a mailbox of a store and return what its engine counts at the end."""
    return asyncio.run(_live(store, mailbox, taken, mode))


def send(store: Store, mailbox: str, sent: Iterable[NewMessage]) -> None:
    """Send messages to a mailbox of a store."""
    live(store, mailbox, [Send(message) for message in sent])


def reference(store: Store, **others: Any) -> ReadModels:
    """Return what the reference fold makes of a store, without envelopes; see `fold`."""
    models = fold({extent: _records(store, extent) for extent in take_extents(store)}, **others)
    for row in models.rows["mailbox"]:
        del row["envelope_blob"]
    return models


def served_rows(opened: ReadModelStore, model: str) -> list[Row]:
    """Return the rows of a model that are served, without envelopes."""
    frames = (frame.drop("envelope_blob", strict=False) for frame in opened.rows(model))
    return [row for frame in frames for row in frame.to_dicts()]


def take_extents(store: Store) -> list[LogExtent]:
    """Return the present extent of every mailbox log of a store."""
    return log_reader(store).extents()


def log_reader(store: Store) -> LogReader:
    """Return the reader of a store's logs."""
    return open_store(str(store)).log_reader()


def model_store(store: Store) -> VerifiableStore | ReadModelStore:
    """Return the read models of a store, for rebuilds."""
    address = into(store)
    return open_store(str(store)).read_model_store() if address is None else open_target(address)


INTO = ""
"""The kind of the target that stores are built into and followed into; empty for their own read models."""


def into(store: Store) -> str | None:
    """Return the address of the target of a store; None for its own read models."""
    return f"{INTO}:{store}-target" if INTO else None


def rebuild(store: Store, **options: Any) -> RebuildReport:
    """Rebuild the read models of a store with Spark."""
    return rebuild_projections(str(store), engine="spark", **options)


def model_target(into: str) -> ReadModelStore:
    """Return the read models in a target for other tools."""
    return open_target(into)


def read_range(
    log: LogReader,
    extent: LogExtent,
    first: int,
    last: int,
    columns: Sequence[str],
    where: Sequence[Condition] = (),
) -> Iterator[pa.RecordBatch]:
    """Yield the records of one mailbox at positions `first` to `last`, in their order."""
    return log.read([Range(extent, first, last)], columns, where)


def new_follower(store: Store, **options: Any) -> Follower:
    """Return a follower of a store."""
    opened = open_store(str(store))
    updater = open_updater(opened, into(store))
    return Follower(updater, lambda archive: open_log_reader(opened, archive), **options)


def build_without_spark(store: Store, bodies: BodyRules = NO_BODIES, into: str | None = None) -> int:
    """Rebuild the read models of a store in many small parts, in this process, and return their version.

    Arguments:
        bodies: whose bodies are searched for words.
        into: where they are built into; the store's own read models by default.
    """
    with small_parts():
        report = rebuild_projections(str(store), bodies=bodies, restart=True, into=into, runner=LocalRunner())
        return report.version


@contextmanager
def small_parts() -> Iterator[None]:
    """Make plans of parts so small that most messages reach into several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "POSITIONS", (POSITIONS, POSITIONS))
        patch.setattr(plan, "POSITIONS_PER_BUCKET", POSITIONS_PER_BUCKET)
        yield


def begin(
    store: Store,
    *,
    into: ReadModelStore | None = None,
    models: Sequence[str] = (),
    bodies: BodyRules = NO_BODIES,
    restart: bool = False,
    extents: Sequence[LogExtent] | None = None,
) -> AbstractContextManager[Build]:
    """Begin a version of a store's read models in many small parts, or continue one.

    Arguments:
        into: where the read models are stored.
        models: which, all by default; the others are shared, so the log is read as far as they are.
        extents: how far to read.
    """

    def make(active: ActiveVersion | None) -> Plan:
        read = log_reader(store).extents(active.positions if active and models else None)
        rules = msgspec.json.encode(bodies).decode()
        names = tuple(models or load_projections())
        return Plan(tuple(read if extents is None else extents), names, POSITIONS, BUCKETS, rules)

    return (into or model_store(store)).build(make, restart=restart)


def fold_all(store: Store, build: Build) -> None:
    """Do what the tasks of a rebuild do, as far as it is not done."""
    for part in log_parts(build.plan):
        list(tasks(store, build).run(part))
    if build.plan.truncated is None:
        build.remove_truncated(())
    for part in bucket_parts(build.plan):
        list(tasks(store, build).run(part))


def tasks(store: Store, build: Build) -> RebuildTasks:
    """Return the tasks of a rebuild."""
    return RebuildTasks(log_reader(store), build.plan, build.plan.projections(), build.writer())


def finish(build: Build, *, flip: bool = True) -> None:
    """Load what was folded, and make it the active version."""
    build.load(lambda done, total: None)
    build.merge()
    build.index(lambda done, total: None)
    if flip:
        build.flip(build.counts(), {})


def open_log(store: Store, mailbox: str, *, create_missing: bool = True) -> Any:
    """Open the log of a mailbox in a store of any kind."""
    opened = open_store(str(store))
    if create_missing:
        return opened.event_log(mailbox, durability="relaxed")
    return opened.existing_log(mailbox)


def _records(store: Store, extent: LogExtent) -> list[Any]:
    with closing(open_log(store, extent.name, create_missing=False)) as log:
        return list(log.read())


async def _live(store: Store, mailbox: str, taken: Sequence[Step], mode: MailboxMode) -> list[TopicCount]:
    clock = ManualClock()
    clock.wall_us = START_US
    log = open_log(store, mailbox)
    engine = MailboxEngine(log, clock)
    await engine.open("a test", mode, SettingsChanges.of(None, POLICY))
    post = OwnedMailbox(engine, clock)
    received: list[ReceivedMessage] = []
    for step in taken:
        clock.advance(1)
        if isinstance(step, Wait):
            clock.advance(step.ms)
        elif isinstance(step, Reopen):
            await engine.close()
            engine = MailboxEngine(log, clock)
            await engine.open("a test", mode, SettingsChanges.of(None, POLICY))
            post = OwnedMailbox(engine, clock)
        else:
            with suppress(Rejected):  # a refused command leaves no trace: nothing to agree about
                await _take(post, step, received)
    await engine.close()  # first: it may still end what has run out of time
    counts = count(engine.mailbox, engine.mailbox.at)
    log.close()
    return counts


async def _take(post: OwnedMailbox, step: Step, received: list[ReceivedMessage]) -> None:
    match step:
        case Send(message):
            await post.send_message(message)
        case Receive(topic):
            received += await post.receive_messages(topic)
        case Settle(how, which) if received:
            receipt = received[which % len(received)].receipt
            if how == "ack":
                result = None if which % 2 else MessageResult(b"\x00 of %d" % which, "text/plain")
                await post.ack_messages([receipt], results=[result])
            elif how == "nack":
                await post.nack_messages([receipt], reason=f"timeout after {which} ms", delay_ms=which * 100)
            elif how == "reject":
                await post.nack_messages([receipt], reason=f"no customer {which}", action="reject")
            elif how == "release":
                await post.nack_messages([receipt], delay_ms=which * 100, action="release")
            else:
                await post.extend_visibility([receipt], visibility_ms=300)
        case Operate("redrive", topic):
            await post.redrive_dead_letters(topic)
        case Operate("purge", topic):
            await post.purge_topic(topic)
        case Operate("subscribe", topic):
            await post.set_subscription(TOPICS[2], SubscriptionFilter((topic,)))
        case Operate("cancel" | "reschedule" as how, topic):
            waiting = [each for each in post.engine.mailbox.messages.values() if each.topic == topic]
            ids = [message_id(each.stream) for each in waiting[:2]]
            if how == "cancel":
                await post.cancel_messages(ids, reason="ordered twice")
            else:
                await post.reschedule_messages(ids, deliver_after_ms=400)
