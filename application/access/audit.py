"""Port: the audit log, who searched and who read payloads over a network surface (RFC-037)."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

ALLOWED = "allowed"
"""Outcome of an access that was answered; that of a failed one is its error code, such as `E_CAP_SCOPE`."""
CANCELLED = "cancelled"
"""Outcome of an access whose caller did not wait for the answer."""


class AuditEntry(msgspec.Struct, frozen=True):
    """One access of a principal: what was searched or read, and the outcome.

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
