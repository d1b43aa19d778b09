"""Mailboxes in memory for the tests of applications, under a clock that the tests move."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import msgspec

from postroom.adapters.compose import OwnedMailbox, make_settings
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.stored_snapshots import fold_message
from postroom.application.queries.get_message import status_name
from postroom.application.text import pluralize
from postroom.application.threads import background_task
from postroom.application.workers.handler import make_result
from postroom.application.workers.retry import Duration, read_duration
from postroom.domain.arguments import check_type
from postroom.domain.envelope.build import open_envelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.commands import Sweep
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.message import ACKED, Message, MessageSent
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox, message_id
from postroom.domain.policy import MailboxLimits, TopicPolicy

_START = datetime(2030, 1, 1, tzinfo=UTC)
_SECOND_US = 1_000_000
_MAX_SECONDS = 100 * 366 * 86_400
ANY = object()
"""Any payload."""
_MAX_LINES = 10
_MAX_SHOWN = 200
"""Messages that the error of an assertion shows, and bytes of each payload."""


class ManualClock:
    """A clock that stands still until a test moves it; it begins on 1 January 2030."""

    def __init__(self) -> None:
        self._elapsed_us = 0
        self._mailboxes: list[MemoryMailbox] = []

    def wall(self) -> int:
        """Return the time, µs since 1970 UTC."""
        return int(_START.timestamp()) * _SECOND_US + self._elapsed_us

    def uptime(self) -> int:
        """Return µs since the machine's start."""
        return 60 * _SECOND_US + self._elapsed_us

    def boot(self) -> str:
        """Return the id of the machine's start."""
        return "test"

    async def advance(self, seconds: float | Duration) -> None:
        """Move the clock, and return when its mailboxes have done what was due: timeouts, expiry, schedules.

        Arguments:
            seconds: a number, or a duration such as `1h` or a timedelta.

        Raises: InvalidRequest for anything but a time up to 100 years, and for a negative one, as log time
            never goes back.
        """
        if isinstance(seconds, str | timedelta):
            seconds = read_duration("seconds", seconds) / 1_000
        elif type(seconds) is not int:
            check_type("seconds", seconds, float)
        if seconds < 0:
            raise InvalidRequest(f"A clock can't be moved back; seconds was {seconds}.")
        if not seconds <= _MAX_SECONDS:  # also refuses NaN
            raise InvalidRequest(f"seconds must be at most {_MAX_SECONDS:,} (100 years); it was {seconds}.")
        self._elapsed_us += round(seconds * _SECOND_US)
        for mailbox in self._mailboxes:
            await mailbox.send_due_ticks()
            while (await mailbox.engine.submit([Sweep()]))[0]:
                pass


class MemoryMailbox(OwnedMailbox):
    """A mailbox in memory; see `Mailbox`."""

    def __init__(self, engine: MailboxEngine, clock: ManualClock) -> None:
        super().__init__(engine, clock)
        self.clock = clock

    def assert_sent(self, topic: str, payload: object = ANY, *, count: int | None = None) -> list[str]:
        """Check that messages were sent to a topic, and return their ids in the order of the sends.

        Arguments:
            payload: payload of the messages: `bytes`, text, or a value that is equal as JSON; any payload
                without it.
            count: their number; None for one or more.

        Raises: AssertionError with what was sent.
        """
        messages = self._messages(topic, payload)
        if len(messages) == count or (messages and count is None):
            return [message_id(each.stream, each.headers.message_id) for each in messages]
        raise AssertionError(self._describe("sent", topic, payload, count, self._messages()))

    def assert_handled(self, topic: str, payload: object = ANY, *, count: int | None = None) -> list[str]:
        """Check that messages of a topic were acked, and return their ids in the order of the sends.

        Arguments:
            payload, count: see `assert_sent`.

        Raises: AssertionError with the messages of the topic, their statuses and errors.
        """
        messages = [each for each in self._messages(topic, payload) if self._state(each).status == ACKED]
        if len(messages) == count or (messages and count is None):
            return [message_id(each.stream, each.headers.message_id) for each in messages]
        raise AssertionError(self._describe("handled", topic, payload, count, self._messages(topic)))

    def _messages(self, topic: str | None = None, payload: object = ANY) -> list[MessageSent]:
        """Return the messages that were sent, of a topic and with a payload if these are given."""
        sent = [each.event for each in self.engine.log.read() if isinstance(each.event, MessageSent)]
        content = None if payload is ANY else _as_json(_encode(payload))
        return [
            each
            for each in sent
            if topic in (None, each.topic) and (payload is ANY or _as_json(_payload(each)) == content)
        ]

    def _state(self, sent: MessageSent) -> Message:
        message = fold_message(self.engine.log.read_stream(sent.stream))
        assert message is not None
        return message

    def _describe(
        self, verb: str, topic: str, payload: object, count: int | None, messages: Sequence[MessageSent]
    ) -> str:
        content = "" if payload is ANY else f" with the payload {payload!r}"
        number = "No message" if count is None else f"Not {pluralize(count, 'message')}"
        lines = [f"{number} of topic {topic}{content} {'was' if count in (None, 1) else 'were'} {verb}:"]
        for each in messages[:_MAX_LINES]:
            state = self._state(each)
            error = "" if state.last_error is None else f", {state.last_error}"
            status = status_name(state, self.engine.now())
            lines.append(f"  {each.topic} {_payload(each)[:_MAX_SHOWN]!r} is {status}{error}")
        if len(messages) != len(lines) - 1:
            lines.append(f"  and {pluralize(len(messages) - _MAX_LINES, 'other')}")
        return "\n".join(lines if messages else [*lines, "  there is no message"])


def _encode(payload: object) -> bytes:
    result = make_result(payload)
    return b"null" if result is None else result.payload


def _payload(sent: MessageSent) -> bytes:
    return open_envelope(sent.envelope).payload


def _as_json(data: bytes) -> object:
    """Return the value of a payload that is JSON; any other payload is its own value."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return data


@asynccontextmanager
async def open_memory_mailbox(
    name: str = DEFAULT_MAILBOX,
    *,
    clock: ManualClock | None = None,
    mode: MailboxMode | None = None,
    limits: MailboxLimits | None = None,
    default_policy: TopicPolicy | None = None,
) -> AsyncIterator[MemoryMailbox]:
    """Open an empty mailbox whose timers run by a clock that the test moves.

    Delays, visibility timeouts, backoffs, expiry and retention follow `mailbox.clock`; `wait_ms` of a receive
    and the rate of a redrive job are real time.

    Arguments:
        clock: shared by several mailboxes; None creates one.
        mode, limits, default_policy: see `open_mailbox`.
    """
    clock = clock or ManualClock()
    engine = MailboxEngine(MemoryEventLog(check_mailbox(name)), clock)
    await engine.open("test", mode, make_settings(limits, default_policy))
    mailbox = MemoryMailbox(engine, clock)
    clock._mailboxes.append(mailbox)
    try:
        async with background_task(mailbox.redrives.worker.run()):
            yield mailbox
    finally:
        clock._mailboxes.remove(mailbox)
        await engine.close()
