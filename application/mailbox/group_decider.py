"""Decisions of a group of commands: its events and answers."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

from postroom.application.mailbox.codec import encode_events
from postroom.application.mailbox.command_enricher import (
    SETTLING,
    CommandEnricher,
    Content,
    from_group,
    has_sent,
)
from postroom.application.mailbox.command_queue import arrange
from postroom.application.mailbox.groups import Group, GroupEvents, LoadedMailbox, Request, copies_of
from postroom.application.messages import MessageDelivery
from postroom.application.metrics import DrainRate, ReorderDepth
from postroom.application.ports.event_log import Accepted, Answer
from postroom.application.telemetry import logger
from postroom.domain.commit import EventColumns
from postroom.domain.errors import (
    IntegrityFailure,
    InternalError,
    PostroomError,
    Rejected,
    Saturated,
    Unavailable,
)
from postroom.domain.mailbox.batch import decide_batch, decide_receives, evolve_batch, is_batch
from postroom.domain.mailbox.commands import Command, Nack, Receive, Send, Sweep
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import (
    MS,
    Message,
    MessageAcked,
    MessageExpired,
    MessageReceived,
    MessageSent,
    Receipt,
)
from postroom.domain.record import Event
from postroom.domain.subscription import AdvanceSubscription

DRAIN_RATES = 1_024
"""Maximum number of topics whose drain rate is known."""
PART_COPIES = 1_000
"""Copies for subscriptions after which other calls run, about 25 ms."""


class GroupDecider:
    """Decider of groups; evolves the state by the events of each command before the next."""

    def __init__(
        self,
        enricher: CommandEnricher,
        reorder: ReorderDepth,
        admit: Callable[[Mailbox, int], None] | None = None,
        *,
        is_merging: bool = True,
    ) -> None:
        self._reorder = reorder
        self._enricher = enricher
        self._cache = enricher.cache
        self._admit = admit
        self._is_merging = is_merging
        self._drain_rates: dict[str, DrainRate] = {}
        self._is_careful = False

    async def decide(
        self,
        requests: list[Request],
        state: LoadedMailbox,
        now: int,
        *,
        is_careful: bool = False,
        group: Group | None = None,
    ) -> Group:
        """Decide requests, after a sweep if a timer is due.

        Arguments:
            now: log time, µs.
            is_careful: encode the events of each command before they are applied. Used after the events of a
                group could not be encoded, so that only the command at fault fails.
            group: the group that they are a part of, which was decided at the same time; None for a new one.

        Raises: Unavailable when the log could not be read; then the state is void.
        """
        if group is not None:
            group.requests.extend(requests)
        else:
            group = Group(requests, state, [], GroupEvents(), {}, {})
            self._is_careful = is_careful
            if state.mailbox.needs_sweep(now):
                self._apply(decide(Sweep(), state.mailbox, now), group)
        before, answered = dict(group.events.acked), len(group.answers)
        group.answers.extend([] for _ in requests)
        is_arranged = self._is_merging and not is_careful and len(requests) > 1
        for places in arrange(requests) if is_arranged else ([place] for place in range(len(requests))):
            run = [requests[place] for place in places]
            answers: Sequence[list[Answer] | IntegrityFailure] | None = None
            if self._is_merging and not is_careful:
                if type(run[0].commands[0]) is Receive:
                    answers = await self._receive_together(run, group, now)
                elif len(run) > 1:
                    answers = await self._execute_together(run, group, now)
            if answers is None:
                answers = [await self._decide_request(each, group, now) for each in run]
            for place, each in zip(places, answers, strict=True):
                group.answers[answered + place] = each
        for topic, count in group.events.acked.items():
            self._drain_rate(topic).record_drain(count - before.get(topic, 0), now)
        return group

    async def _receive_together(
        self, requests: Sequence[Request], group: Group, now: int
    ) -> list[list[Answer]] | None:
        """Decide receives of a topic; None if they must be decided one by one."""
        commands = [each for request in requests for each in request.commands if type(each) is Receive]
        if len(commands) > len(requests) or any(each.answers.cancelled() for each in requests):
            return None
        mailbox = group.state.mailbox
        try:
            decisions = decide_receives(commands, mailbox, now)
            if decisions is None:
                return None
            events, counts = decisions
            messages = [mailbox.messages[stream] for stream in events.columns[0]]
            contents = await self._enricher.take(messages, commands, group, now)
        except Exception:  # of one of them, which fails again when it is decided alone
            return None
        if contents is None or (not messages and mailbox.in_flight >= mailbox.limits.in_flight_ceiling):
            return None
        deliveries = iter(self._deliver(events, messages, commands[0].topics, contents, group))
        return [[list(islice(deliveries, count))] for count in counts]

    async def _execute_together(
        self, requests: Sequence[Request], group: Group, now: int
    ) -> list[list[Answer]] | None:
        """Decide sends or acks as one batch; None if they must be decided one by one."""
        commands: Sequence[Command] = [each for request in requests for each in request.commands]
        mailbox = group.state.mailbox
        if mailbox.subscriptions and copies_of(commands, mailbox) > PART_COPIES:
            return None
        try:
            if _needs_log(commands, mailbox):
                commands = await self._enricher.from_log(commands, group)
        except Exception:  # of one of them, which fails again when it is decided alone
            return None
        answers = self._execute_batch(commands, group, now)
        if answers is None:
            return None
        remaining = iter(answers)
        return [list(islice(remaining, len(each.commands))) for each in requests]

    async def _decide_request(
        self, request: Request, group: Group, now: int
    ) -> list[Answer] | IntegrityFailure:
        # Messages delivered to a receiver that has given up would stay hidden until their visibility timeout.
        if all(type(each) is Receive for each in request.commands) and request.answers.cancelled():
            return []
        commands, mailbox = request.commands, group.state.mailbox
        try:
            if _needs_log(commands, mailbox):
                commands = await self._enricher.from_log(commands, group)
        except IntegrityFailure as failure:
            return failure
        except PostroomError:
            raise
        except Exception as error:
            return [self._defect(command, group, error) for command in commands]
        parts = [commands]
        copies = copies_of(commands, mailbox) if mailbox.subscriptions else 0
        if copies > PART_COPIES:
            size = max(1, len(commands) * PART_COPIES // copies)
            parts = [commands[start : start + size] for start in range(0, len(commands), size)]
        answers: list[Answer] = []
        for part in parts:
            if answers:
                await asyncio.sleep(0)  # lets other calls run
            is_batch = len(part) > 1 and self._is_merging and not self._is_careful
            answers += (self._execute_batch(part, group, now) if is_batch else None) or [
                await self._receive(command, group, now)
                if type(command) is Receive
                else self._execute(command, group, now)
                for command in part
            ]
        return answers

    async def _receive(self, command: Receive, group: Group, now: int) -> Answer:
        """Decide a receive and evolve the state; a refused one changes nothing."""
        mailbox = group.state.mailbox
        try:
            command, payloads = await self._enricher.load_payloads(command, group, now)
            events = decide(command, mailbox, now)
            messages = [mailbox.messages[each.stream] for each in events if type(each) is MessageReceived]
            contents = [payloads[message.stream] for message in messages]
            return self._deliver(events, messages, command.topics, contents, group)
        except Exception as error:
            return self._refusal(command, group, error, now)

    def _deliver(
        self,
        events: Sequence[Event],
        messages: Sequence[Message],
        topics: Sequence[str],
        contents: Sequence[Content],
        group: Group,
    ) -> list[MessageDelivery]:
        """Evolve the state by the events of receives, and return the deliveries.

        Arguments:
            messages: those that are delivered.
            topics: of the receives.
            contents: of the messages.
        """
        epoch, mailbox = group.state.epoch, group.state.mailbox
        self._apply(events, group)
        in_order = {name for name in topics if not mailbox.policy(name).priorities}
        group.events.delivered.update([message.topic for message in messages])
        self._reorder.delivered([message for message in messages if message.topic in in_order])
        ordered = {name for name in topics if mailbox.policy(name).ordered_keys}
        return [
            MessageDelivery(
                Receipt(message.stream, message.delivery, epoch),
                message.topic,
                message.shard,
                message.attempt,
                message.due,
                content.headers.message_id,
                content.idem_key,
                content.payload_hash,
                content.hash_chain,
                content.envelope,
                message.sticky_key if message.topic in ordered else None,
                message.position,
            )
            for message, content in zip(messages, contents, strict=True)
        ]

    def _execute_batch(self, commands: Sequence[Command], group: Group, now: int) -> list[Answer] | None:
        """Decide commands of one type, each of which causes one event; None, if they are others."""
        mailbox = group.state.mailbox
        kind = type(commands[0])
        if len(set(map(type, commands))) > 1 or (
            kind is Send and (self._admit is not None or (group.sent and has_sent(group, commands)))
        ):
            return None
        try:
            events = decide_batch(commands, mailbox, now)
        except Exception:  # of one of them, which fails again when it is decided alone
            return None
        if events is None:
            return None
        if kind is not Send:
            self._apply(events, group)
            return [1] * len(commands)
        sends = cast("Sequence[Send]", commands)
        self._apply(events, group, sends)
        group.events.sent_by_topic[sends[0].topic] += len(sends)
        group.sent.update(zip([send.message for send in sends], sends, strict=True))
        return [Accepted(send.message, False) for send in sends]

    def _execute(self, command: Command, group: Group, now: int) -> Answer:
        """Decide any other command and evolve the state; a refused one changes nothing."""
        mailbox = group.state.mailbox
        try:
            if group.sent or group.removed:
                command = from_group(command, group)
            events = decide(command, mailbox, now)
            # Copies make room: a settled message is forgotten once every subscription has its copy.
            if self._admit is not None and type(command) is not AdvanceSubscription:
                size = sum(len(each.envelope) for each in events if type(each) is MessageSent)
                if size:
                    self._admit(mailbox, size)
            if type(command) is not Send:
                nacked = mailbox.messages.get(command.receipt.message) if type(command) is Nack else None
                self._apply(events, group)
                if nacked is not None and events:
                    group.events.nacked[nacked.topic] += 1
                return len(events)
            if not events or type(events[0]) is not MessageSent:
                self._apply(events, group)
                return self._duplicate(command, mailbox, now)
            self._apply(events, group)
        except Exception as error:
            return self._refusal(command, group, error, now)
        group.events.sent_by_topic[command.topic] += 1
        group.sent[command.message] = command
        return Accepted(command.message, duplicate=False)

    def _refusal(self, command: Command, group: Group, error: Exception, now: int) -> Rejected:
        """Return the answer to a command that failed; raises an error that concerns the whole group."""
        if isinstance(error, Rejected):
            if isinstance(error, Saturated) and type(command) is Send and command.topic in self._drain_rates:
                error.retry_after_ms = self._drain_rates[command.topic].retry_ms(1, now)
            return error
        if isinstance(error, PostroomError):
            raise error
        return self._defect(command, group, error)

    def _defect(self, command: Command, group: Group, error: Exception) -> InternalError:
        """Log a defect with its traceback, and return the answer to the failed command."""
        mailbox, kind = group.state.mailbox.name, type(command).__name__
        logger().exception("mailbox.command_failed", mailbox=mailbox, command=kind)
        return InternalError(
            f"Mailbox {mailbox} failed on a {kind} command ({type(error).__name__}); nothing was recorded. "
            "Report the traceback that was logged."
        )

    def _apply(self, events: Sequence[Event], group: Group, sends: Sequence[Send] = ()) -> None:
        """Evolve the state by events; on failure, the state is void.

        Arguments:
            sends: the commands that caused `events`, if they are sends that were decided together.
        """
        if self._is_careful and events:
            encode_events(events, [0] * len(events))
        mailbox, log = group.state.mailbox, group.events
        try:
            if len(events) > 1 and self._is_merging and is_batch(events):
                columns = events if isinstance(events, EventColumns) else EventColumns.of(events)
                self._apply_columns(columns, group, sends if columns is events else ())
                return
            for event in events:
                if type(event) is MessageSent:
                    log.add_sent(event)
                    evolve(mailbox, event)
                    self._cache.put(mailbox.position, event)
                    continue
                message = mailbox.messages.get(event.stream)
                log.add(event, mailbox.position + 1, message)
                evolve(mailbox, event)
                if message is not None and isinstance(event, MessageAcked | MessageExpired):
                    group.removed[message.stream] = message
                    self._cache.pop(message.position)  # one that was never received
                    if type(event) is MessageAcked:
                        log.acked[message.topic] += 1
        except Exception as error:
            logger().exception("mailbox.evolve_failed", mailbox=mailbox.name)
            raise Unavailable(
                f"Mailbox {mailbox.name} failed on an event ({type(error).__name__}) and is loaded "
                "again; retry shortly."
            ) from error

    def _apply_columns(self, events: EventColumns, group: Group, sends: Sequence[Send] = ()) -> None:
        """Evolve the state by events of one type; see `_apply`."""
        mailbox, first = group.state.mailbox, group.state.mailbox.position + 1
        if events.type is MessageSent:
            group.events.add_all_sent(events)
            evolve_batch(mailbox, events)
            self._enricher.put_sent(first, events, sends)
            return
        messages = [mailbox.messages[stream] for stream in events.columns[0]]
        group.events.add_all(events, first, messages)
        evolve_batch(mailbox, events)
        if events.type is MessageAcked:
            group.removed.update(zip([message.stream for message in messages], messages, strict=True))
            self._cache.drop([message.position for message in messages])  # those that were never received
            group.events.acked.update([message.topic for message in messages])

    def _drain_rate(self, topic: str) -> DrainRate:
        rate = self._drain_rates.get(topic)
        if rate is None:
            if len(self._drain_rates) >= DRAIN_RATES:
                self._drain_rates.clear()
            rate = self._drain_rates[topic] = DrainRate()
        return rate

    def _duplicate(self, command: Send, mailbox: Mailbox, now: int) -> Accepted:
        """Return the answer to a send whose message exists."""
        topic = mailbox.topics.get(command.topic)
        if topic is None or command.existing_hash is not None or command.message in mailbox.messages:
            return Accepted(command.message, duplicate=True)
        if command.idem_key is not None:
            original = topic.window.find(command.idem_key, now - topic.policy.replay_window_ms * MS)
            if original is not None:
                return Accepted(original.message, duplicate=True)
        holder = None if command.unique_key is None else topic.unique.get(command.unique_key)
        return Accepted(command.message if holder is None else holder.stream, duplicate=True)


def _needs_log(commands: Sequence[Command], mailbox: Mailbox) -> bool:
    """Return whether the log is read before commands are decided; see `CommandEnricher.from_log`."""
    messages = mailbox.messages
    for command in commands:
        if type(command) is Send:
            if command.has_external_id or command.message in messages:
                return True
        elif isinstance(command, SETTLING):
            if command.receipt.message not in messages:
                return True
        elif type(command) is AdvanceSubscription:
            return True
    return False
