"""`Auditor`: records searches and reads of payloads before their results are returned (RFC-037)."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from postroom.application.access.audit import ALLOWED, CANCELLED, AuditEntry, AuditLog
from postroom.application.correlation import current_corr_id
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Operation
from postroom.domain.errors import InternalError, PostroomError

T = TypeVar("T")


class Auditor:
    """The audit log, for the reads of one capability on one mailbox.

    Arguments:
        wall: the wall clock in µs since 1970 UTC.
    """

    def __init__(self, log: AuditLog, access: Access, mailbox: str, wall: Callable[[], int]) -> None:
        self._log = log
        self._access = access
        self._mailbox = mailbox
        self._wall = wall

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
        """Return the result of `read`, or raise its error, after the read was recorded.

        Arguments:
            operation: the right that the read needs.
            count: returns the number of messages in a result.
            topics, target, criteria: fields of the `AuditEntry`.

        Raises: Unavailable if the read can't be recorded.
        """
        matches, outcome = 0, InternalError.code
        try:
            answer = await read()
            matches, outcome = count(answer), ALLOWED
            return answer
        except asyncio.CancelledError:  # whether it was read is unknown
            outcome = CANCELLED
            raise
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
                        current_corr_id() or "",
                        tuple(criteria),
                    )
                ]
            )
