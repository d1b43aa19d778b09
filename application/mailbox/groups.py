"""A mailbox in its owner's memory, and groups of commands that are decided on it together."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from postroom.application.mailbox import records
from postroom.application.mailbox.codec import make_commit
from postroom.application.mailbox.snapshots import Save, Snapshots
from postroom.application.mailbox.stored_snapshots import SavedPart, fold_from
from postroom.application.messages import MessageDelivery
from postroom.application.ports.event_log import Answer, EventLogReader
from postroom.domain.commit import GENESIS, Commit, EventColumns, LastEvent, each_event
from postroom.domain.errors import IntegrityFailure, PostroomError
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Pause,
    Purge,
    Receive,
    Redrive,
    Resume,
    Send,
    SetPolicy,
    TakeOwnership,
)
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import Message, MessageAcked, MessageDeadLettered, MessageSent, Receipt
from postroom.domain.record import Event
from postroom.domain.subject import ALGORITHM

MAX_ENVELOPE_BYTES = 16 << 20
"""Envelopes, results and tracebacks of one commit, in bytes, unless a single one is larger."""


def is_indexed(event: Event, distance_from_sent: int) -> bool:
    """Return whether a message's latest event is so far from the first that the index has its position.

    Arguments:
        event: the latest event.
        distance_from_sent: how many positions after `MessageSent` it is.
    """
    return distance_from_sent > records.SCAN_POSITIONS and isinstance(event, records.INDEXED)


class CommitEvents:
    """The events of one commit, in the order in which they were applied.

    Arguments:
        distances: see `Record.distance`.
        last_events: see `Commit`.
    """

    __slots__ = ("distances", "envelope_bytes", "events", "last_events")

    def __init__(self) -> None:
        self.events: list[Event | EventColumns] = []
        self.distances: list[int] = []
        self.last_events: list[LastEvent] = []
        self.envelope_bytes = 0


class GroupEvents:
    """The events of a group: usually of one commit, of more if their envelopes are large.

    Arguments:
        acked: number of messages acked, by topic.
        sent_by_topic, delivered, nacked: the same of those sent, delivered and nacked.
    """

    __slots__ = ("_last", "acked", "commits", "delivered", "nacked", "sent_by_topic")

    def __init__(self) -> None:
        self._last = CommitEvents()
        self.commits = [self._last]
        self.acked: Counter[str] = Counter()
        self.sent_by_topic: Counter[str] = Counter()
        self.delivered: Counter[str] = Counter()
        self.nacked: Counter[str] = Counter()

    def add_sent(self, event: MessageSent) -> None:
        """Add the first event of a message."""
        commit, size = self._last, len(event.envelope)
        if commit.envelope_bytes + size > MAX_ENVELOPE_BYTES and commit.events:
            commit = self._begin_commit()
        commit.envelope_bytes += size
        commit.events.append(event)
        commit.distances.append(0)

    def add(self, event: Event, position: int, message: Message | None) -> None:
        """Add an event of the mailbox or of a message, before it is applied to it.

        Arguments:
            position: of the event.
        """
        commit = self._last
        if type(event) is MessageAcked:
            content = event.result
        else:
            content = event.traceback if type(event) is MessageDeadLettered else None
        if content is not None:
            if commit.envelope_bytes + len(content) > MAX_ENVELOPE_BYTES and commit.events:
                commit = self._begin_commit()
            commit.envelope_bytes += len(content)
        commit.events.append(event)
        if message is None:
            commit.distances.append(0)
            return
        commit.distances.append(position - message.last)
        if is_indexed(event, position - message.position):
            commit.last_events.append(LastEvent(event.stream, message.position, position))

    def add_all_sent(self, events: EventColumns) -> None:
        """Add the first events of messages; see `add_sent`."""
        commit, size = self._last, sum(map(len, events.column("envelope")))
        if commit.envelope_bytes + size > MAX_ENVELOPE_BYTES:
            for event in events:
                if isinstance(event, MessageSent):
                    self.add_sent(event)
            return
        commit.envelope_bytes += size
        commit.events.append(events)
        commit.distances += [0] * len(events)

    def add_all(self, events: EventColumns, first: int, messages: Sequence[Message]) -> None:
        """Add events before they are applied to their messages; see `add`.

        Arguments:
            first: position of the first event.
        """
        commit, positions = self._last, range(first, first + len(events))
        commit.events.append(events)
        commit.distances += [p - message.last for p, message in zip(positions, messages, strict=True)]
        farthest = positions[-1] - min([message.position for message in messages])
        if farthest > records.SCAN_POSITIONS and issubclass(events.type, records.INDEXED):
            commit.last_events += [
                LastEvent(message.stream, message.position, position)
                for position, message in zip(positions, messages, strict=True)
                if position - message.position > records.SCAN_POSITIONS
            ]

    def _begin_commit(self) -> CommitEvents:
        commit = self._last = CommitEvents()
        self.commits.append(commit)
        return commit

    def sent(self, first: int) -> dict[int, MessageSent]:
        """Return the messages that the group sent, by position.

        Arguments:
            first: position of its first event.
        """
        events = each_event([each for commit in self.commits for each in commit.events])
        return {p: event for p, event in enumerate(events, first) if isinstance(event, MessageSent)}


class LoadedMailbox:
    """Mailbox in memory, which may be ahead of its log by the appends in progress.

    Arguments:
        chain: chain hash of the last commit.
        parts: parts of the snapshot from which it was loaded, oldest first.

    `position` is the end of the last commit; the mailbox is ahead of it while a group is decided. `epoch` is
    the epoch of new commits. `failure` is the error of an append, which made the state void: the log lacks
    events that are applied to the state.
    """

    __slots__ = ("chain", "epoch", "failure", "mailbox", "position", "snapshots")

    def __init__(self, mailbox: Mailbox, chain: bytes, parts: Sequence[SavedPart] = ()) -> None:
        self.mailbox = mailbox
        self.position = mailbox.position
        self.chain = chain
        self.snapshots = Snapshots(parts)
        self.epoch = mailbox.epoch
        self.failure: PostroomError | None = None

    def commit(self, events: GroupEvents) -> list[Commit]:
        """Return the commits of the events that were applied since the last one.

        Raises: see `make_commit`.
        """
        commits = []
        position, chain = self.position, self.chain
        for part in events.commits:
            if not part.events:
                continue
            commit = make_commit(
                part.events,
                part.distances,
                first=position + 1,
                epoch=self.epoch,
                previous=chain,
                last_events=part.last_events,
            )
            position, chain = commit.last, commit.chain
            commits.append(commit)
        self.position, self.chain = position, chain
        return commits

    def take_ownership(self, command: TakeOwnership, now: int) -> list[Commit]:
        """Evolve the state by a change of owner at `now` (µs), and return its commits, to be appended.

        Raises: Fenced when the command has an epoch that is not above the log's, WrongMode and
            SettingsConflict when the mailbox has another mode or other settings.
        """
        group = GroupEvents()
        events = decide(command, self.mailbox, now)
        self.epoch = self.mailbox.epoch + 1 if command.epoch is None else command.epoch
        for event in events:
            group.add(event, self.mailbox.position + 1, None)
            evolve(self.mailbox, event)
        return self.commit(group)

    def advance_snapshot(self, save: Save) -> None:
        """Do a step of the next snapshot, if it is time; see `Snapshots.advance`."""
        if self.snapshots.is_active or self.mailbox.position >= self.snapshots.next_position:
            self.snapshots.advance(self.mailbox, self.chain, save)

    @property
    def records_since_snapshot(self) -> int:
        """Return the number of records after the newest snapshot."""
        return self.mailbox.position - self.snapshots.position


async def load_mailbox(log: EventLogReader) -> LoadedMailbox:
    """Load a mailbox from its log, off the event loop.

    Raises: BrokenLog when the log can't be folded, Unavailable when it can't be read.
    """

    def load() -> LoadedMailbox:
        mailbox, parts = fold_from(log)
        head = log.head()
        return LoadedMailbox(mailbox, head.chain if head is not None else GENESIS, parts)

    return await asyncio.to_thread(load)


class Answers(Protocol):
    """Receiver of the answers to a request: a future, or `QueuedAnswers`, which cost less."""

    def done(self) -> bool:
        """Return whether it has the answers or an error, or its caller has given up."""

    def cancelled(self) -> bool:
        """Return whether its caller has given up."""

    def set_result(self, result: list[Answer], /) -> None:
        """Take the answers; raises InvalidStateError if it is done."""

    def set_exception(self, exception: Exception, /) -> None:
        """Take the error of all commands; raises InvalidStateError if it is done."""


class QueuedAnswers(msgspec.Struct, eq=False):
    """Answers to a request, passed to the caller together with others of the same turn of the event loop.

    Arguments:
        queue: the answers that `pass_on` has yet to take.
        pass_on: called soon after the first answers are added to the queue; takes all of them from it.
    """

    queue: list[Any]
    pass_on: Callable[[], None]
    result: Any = None
    error: BaseException | None = None
    is_over: bool = False
    is_cancelled: bool = False

    def done(self) -> bool:
        """Return whether it has the answers or an error, or its caller has given up."""
        return self.is_over or self.is_cancelled

    def cancelled(self) -> bool:
        """Return whether its caller has given up."""
        return self.is_cancelled

    def set_result(self, result: Any, /, error: BaseException | None = None) -> None:
        """Take the answers, or an error."""
        if self.is_over or self.is_cancelled:
            raise asyncio.InvalidStateError
        self.result, self.error, self.is_over = result, error, True
        if not self.queue:
            asyncio.get_running_loop().call_soon(self.pass_on)
        self.queue.append(self)

    def set_exception(self, exception: BaseException, /) -> None:
        """Take the error of all commands."""
        self.set_result(None, exception)


class Request(NamedTuple):
    """Commands of one caller, and the receiver of their answers.

    Arguments:
        began: when they were submitted, in seconds of `perf_counter`.
        is_repeated: whether they were decided before.
    """

    commands: Sequence[Command]
    answers: Answers
    began: float
    is_repeated: bool = False

    def for_retry(self) -> "Request":
        """Return the request to be decided again, with a lookup of the ids of its sends."""
        return self._replace(commands=[as_known(each) for each in self.commands], is_repeated=True)


class Group(NamedTuple):
    """Requests decided together, to be answered when the append of their events is durable.

    Arguments:
        state: the state they were decided on; if it is void, so is the group.
        answers: of each request, or the error that stopped it before any of its commands was decided.
        sent: commands that sent messages, by stream.
        removed: messages that were acked or expired, by stream.
    """

    requests: list[Request]
    state: LoadedMailbox
    answers: list[list[Answer] | IntegrityFailure]
    events: GroupEvents
    sent: dict[bytes, Send]
    removed: dict[bytes, Message]


def deliveries_of(answers: Sequence[Answer]) -> list[MessageDelivery]:
    """Return what the answers to commands deliver."""
    return [delivery for answer in answers if isinstance(answer, list) for delivery in answer]


def releases_of(deliveries: Sequence[MessageDelivery]) -> list[Command]:
    """Return commands that release deliveries whose receivers have given up."""
    return [Nack(each.receipt, 0.0, "the receiver has given up", action="release") for each in deliveries]


COST_BYTES = 4_096
"""Bytes of an envelope or a result that cost as much as a command."""


def topic_of(commands: Sequence[Command], state: LoadedMailbox | None) -> str:
    """Return the topic to which a request counts: the one of its first command; empty if it has none."""
    command = commands[0]
    match command:
        case Send() | Redrive() | Purge() | SetPolicy() | Pause() | Resume():
            return command.topic
        case Receive(topics=(topic, *_)):
            return topic
        case (
            Ack(receipt=Receipt(message=bytes(stream)))
            | Nack(receipt=Receipt(message=bytes(stream)))
            | Extend(receipt=Receipt(message=bytes(stream)))
        ) if state is not None:
            message = state.mailbox.messages.get(stream)
            return message.topic if message is not None else ""
        case _:
            return ""


def copies_of(commands: Sequence[Command], mailbox: Mailbox) -> int:
    """Return how many copies subscriptions get of the messages of a request, if their headers match."""
    sends = Counter(each.topic for each in commands if type(each) is Send)
    return sum(count * len(mailbox.subscriptions_of(topic)) for topic, count in sends.items())


def cost_of(commands: Sequence[Command]) -> int:
    """Return the cost of a request: one for each command, and each 4 KiB of envelope, result or traceback."""
    if type(commands[0]) is Ack:
        sizes = [len(each.result) for each in commands if type(each) is Ack and each.result is not None]
    elif type(commands[0]) is Nack:
        sizes = [
            len(each.traceback) for each in commands if type(each) is Nack and each.traceback is not None
        ]
    else:
        sizes = [len(each.envelope) for each in commands if type(each) is Send]
    return len(commands) + sum([size // COST_BYTES for size in sizes])


def as_known(command: Command) -> Command:
    """Return a command to be repeated: the id of a send is then looked up in the log."""
    return msgspec.structs.replace(command, has_external_id=True) if isinstance(command, Send) else command


def may_be_encrypted(commands: Sequence[Command]) -> bool:
    """Return whether a command has content that is encrypted, or that must be if its message is."""
    if ALGORITHM in [each.headers.encryption for each in commands if type(each) is Send]:
        return True
    contents = [each.result for each in commands if type(each) is Ack]
    contents += [each.traceback for each in commands if type(each) is Nack]
    return contents.count(None) < len(contents)
