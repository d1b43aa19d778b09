"""`Auditor`: records calls before their results are returned (RFC-037, svc-mailbox I-8)."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from postroom.application.access.audit import ALLOWED, CANCELLED, AuditEntry, AuditLog
from postroom.application.messages import NewMessage
from postroom.application.tracing import current_corr_id
from postroom.domain.arguments import MAX_TEXT_CHARS
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, InternalError, PostroomError

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
    """Return a decorator of methods of an object with an `_auditor`: calls that are not covered are recorded.

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
