"""`Auditor`: record who searched and who read payloads, before the answer goes out (RFC-037)."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from postroom.application.access.audit import ALLOWED, AuditEntry, AuditLog
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Operation
from postroom.domain.errors import PostroomError

T = TypeVar("T")


class Auditor:
    """The audit log, for the reads of one capability on one mailbox.

    Arguments:
        wall: the wall clock in µs since 1970 UTC.
        corr_id: returns the correlation id of the present call.
    """

    def __init__(
        self, log: AuditLog, access: Access, mailbox: str, wall: Callable[[], int], corr_id: Callable[[], str]
    ) -> None:
        self._log = log
        self._access = access
        self._mailbox = mailbox
        self._wall = wall
        self._corr_id = corr_id

    async def read(
        self,
        operation: Operation,
        read: Callable[[], Awaitable[T]],
        count: Callable[[T], int],
        *,
        topics: Sequence[str] = (),
        target: str = "",
        criteria: Sequence[str] = (),
    ) -> T:
        """Return what `read` returns, or raise what it raises, when that is recorded.

        Arguments:
            operation: the right that it needs.
            count: returns the number of messages in an answer.
            topics, target, criteria: as of `AuditEntry`.

        Raises: Unavailable when it can't be recorded.
        """
        matches, outcome = 0, ALLOWED
        try:
            answer = await read()
            matches = count(answer)
            return answer
        except PostroomError as error:
            outcome = error.code
            raise
        finally:
            await self._log.record(
                [
                    AuditEntry(
                        self._wall(),
                        self._access.principal,
                        self._access.nonce.hex(),
                        str(operation),
                        self._mailbox,
                        tuple(topics),
                        target,
                        matches,
                        outcome,
                        self._corr_id(),
                        tuple(criteria),
                    )
                ]
            )
