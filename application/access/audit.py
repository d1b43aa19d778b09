"""The audit log: its port, its entries as events, and the auditor, which records calls first."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import msgspec

from postroom.application.mailbox.codec import make_commit
from postroom.application.messages import NewMessage
from postroom.application.ports.event_log import Head
from postroom.application.tracing import current_corr_id
from postroom.domain.arguments import MAX_TEXT_CHARS
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Right
from postroom.domain.commit import GENESIS, Commit
from postroom.domain.errors import BrokenLog, Forbidden, InternalError, PostroomError
from postroom.domain.names import AUDIT_LOG, mailbox_stream
from postroom.domain.record import Record, StoredEvent

ALLOWED = "allowed"
"""Outcome of an access that was answered; a failed one has its error code, such as `E_CAP_SCOPE`."""
CANCELLED = "cancelled"
"""Outcome of an access whose caller did not wait for the answer."""


class AuditEntry(msgspec.Struct, frozen=True):
    """One access of a principal: the object that was searched or read, and the outcome.

    It has no payload, no token and no search term: of a filter, only which fields were used (ADR 0051).

    Arguments:
        at: µs since 1970 UTC.
        principal: whom the capability was issued to.
        capability: root nonce of the capability, in hex.
        operation: the right that was needed, such as `read-payload`.
        topics: the topics that were named, exact or globs; empty for all.
        target: message id, or name of the mailbox for a change of the mailbox as a whole; "" for an access to
            more than one message.
        matches: how many messages were in the answer.
        outcome: `allowed`, `cancelled`, or the code of the error.
        corr_id: correlation id of the call.
        criteria: names of the search criteria that were used, such as `match`; of a change, its name and the
            settings that it names, such as `policy.max_attempts`.
    """

    at: int
    principal: str
    capability: str
    operation: str
    mailbox: str
    topics: tuple[str, ...]
    target: str
    matches: int
    outcome: str
    corr_id: str
    criteria: tuple[str, ...] = ()


class AuditLog(Protocol):
    """The audit log of a store; every adapter passes `tests/conformance/audit_log.py`."""

    async def record(self, entries: Sequence[AuditEntry], /) -> None:
        """Record accesses, all or none; they are durable when this returns.

        To be called before an answer goes out: an access that can't be recorded is refused.

        Raises: Unavailable when they can't be recorded.
        """


ACCESS_AUDITED = "AccessAudited.1"
ENTRIES_REMOVED = "AuditEntriesRemoved.1"
EPOCH = 0
"""Epoch of the audit log's commits; epochs of mailbox owners begin at 1."""
_ENTRIES = mailbox_stream(AUDIT_LOG)
REMOVALS = mailbox_stream(f"{AUDIT_LOG}/removals")
"""Stream of the removals by retention."""


class EntriesRemoved(msgspec.Struct, frozen=True):
    """The removal of the oldest commits by retention.

    Arguments:
        through: position at which the last one ends.
        link: its chain hash, from which the chain of the remaining commits continues.
    """

    through: int
    link: bytes


AuditEvent = AuditEntry | EntriesRemoved
_UNREADABLE = (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError)
_encode = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(AuditEntry).decode
_decode_removal = msgspec.msgpack.Decoder(EntriesRemoved).decode


def to_commit(events: Sequence[AuditEvent], head: Head | None, now: int) -> Commit:
    """Return events as the commit after `head`.

    Arguments:
        events: at least one.
        head: end of the log; None while it is empty.
        now: µs since 1970 UTC; log time never goes back.
    """
    end, at, chain = (0, 0, GENESIS) if head is None else head[:3]
    at = max(at, now)
    # The position is the version, which must only be unique within the stream.
    stored = [_to_event(event, position, at) for position, event in enumerate(events, end + 1)]
    return make_commit(
        stored,
        [0] * len(stored),
        first=end + 1,
        epoch=EPOCH,
        previous=chain,
    )


def _to_event(event: AuditEvent, position: int, at: int) -> StoredEvent:
    stream, type_ = (
        (_ENTRIES, ACCESS_AUDITED) if isinstance(event, AuditEntry) else (REMOVALS, ENTRIES_REMOVED)
    )
    return StoredEvent(stream, position, at, type_, _encode(event))


def to_entry(record: Record) -> AuditEntry | None:
    """Return the entry of a record, with the record's time; None for a removal by retention.

    Raises: BrokenLog for a record that is not one of the audit log's.
    """
    if record.type == ENTRIES_REMOVED:
        return None
    try:
        if record.type != ACCESS_AUDITED:
            raise ValueError(f"its type is {record.type!r}")
        return msgspec.structs.replace(_decode_entry(_state(record)), at=record.at)
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def to_removal(record: Record) -> EntriesRemoved:
    """Return the removal of a record; raise BrokenLog for one that was altered."""
    try:
        return _decode_removal(_state(record))
    except _UNREADABLE as error:
        raise _unreadable(record, error) from error


def _state(record: Record) -> bytes:
    if not isinstance(record.event, StoredEvent):
        raise ValueError(f"it is an event of a mailbox, {record.type}")
    return record.event.state


def _unreadable(record: Record, error: Exception) -> BrokenLog:
    return BrokenLog(
        f"The audit log can't be read at position {record.position}: {error}. Verify it with postroom audit "
        "verify, and restore the store from a backup.",
        record.position,
    )


P = ParamSpec("P")
T = TypeVar("T")

MAX_TOPICS = 100
"""Maximum number of topics in an entry; a call names up to 1,000."""


class Auditor:
    """The audit log, for the calls of one capability on one mailbox.

    Arguments:
        wall: the wall clock in µs since 1970 UTC.
    """

    def __init__(self, log: AuditLog, access: Access, mailbox: str, wall: Callable[[], int]) -> None:
        self._log = log
        self._access = access
        self._mailbox = mailbox
        self._wall = wall

    async def run(
        self,
        operation: Right,
        call: Callable[[], Awaitable[T]],
        count: Callable[[T], int],
        *,
        topics: Sequence[str] = (),
        target: str = "",
        criteria: Sequence[str] = (),
    ) -> T:
        """Return the result of `call`, or raise its error, after the call was recorded.

        Arguments:
            operation: the right that the call needs.
            count: returns the number of messages in a result.
            topics, target, criteria: fields of the `AuditEntry`.

        Raises: Unavailable if the call can't be recorded.
        """
        matches, outcome = 0, InternalError.code
        try:
            answer = await call()
            matches, outcome = count(answer), ALLOWED
            return answer
        except asyncio.CancelledError:  # whether it took effect is unknown
            outcome = CANCELLED
            raise
        except PostroomError as error:
            outcome = error.code
            raise
        finally:
            await self.record(operation, outcome, matches, topics=topics, target=target, criteria=criteria)

    async def record(
        self,
        operation: Right,
        outcome: str,
        matches: int,
        *,
        topics: Sequence[str] = (),
        target: str = "",
        criteria: Sequence[str] = (),
    ) -> None:
        """Record a call that was made or refused; see `AuditEntry`.

        Raises: Unavailable if it can't be recorded.
        """
        await self._log.record(
            [
                AuditEntry(
                    self._wall(),
                    self._access.principal,
                    self._access.nonce.hex(),
                    str(operation),
                    self._mailbox,
                    tuple(topics[:MAX_TOPICS]),
                    target,
                    matches,
                    outcome,
                    current_corr_id() or "",
                    tuple(criteria),
                )
            ]
        )


Method = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]


def audit_refusals(operation: Right) -> Callable[[Method[P, T]], Method[P, T]]:
    """Return a decorator for methods of objects with an `_auditor`, which records calls that are not covered.

    Arguments:
        operation: the right that the call needs.
    """

    def decorate(method: Method[P, T]) -> Method[P, T]:
        @wraps(method)
        async def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await method(self, *args, **kwargs)
            except Forbidden as refusal:
                topics = topics_of(args[0]) if args else ()
                await self._auditor.record(operation, refusal.code, 0, topics=topics)
                raise

        return call

    return decorate


def topics_of(argument: object) -> tuple[str, ...]:
    """Return the topics that the first argument of a call names, for the audit log."""
    items = argument if isinstance(argument, list | tuple) else (argument,)
    names = [each.topic if isinstance(each, NewMessage) else each for each in items]
    return tuple(dict.fromkeys(each for each in names if type(each) is str and len(each) <= MAX_TEXT_CHARS))
