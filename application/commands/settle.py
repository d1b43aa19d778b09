"""`AckMessages`, `NackMessages`, `ExtendVisibility`: end a delivery, or get more time (svc-mailbox C-1)."""

import random
from collections.abc import Callable, Sequence

from postroom.application.engine import MailboxEngine
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Ack, Command, Extend, Nack
from postroom.domain.message import Receipt


class AckMessages:
    """Settle deliveries for good; settling again with the same receipt is fine (svc-mailbox I-3)."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, receipts: Sequence[Receipt]) -> list[Rejected | None]:
        """Ack deliveries by their receipts.

        Returns: for each, None when it is settled, else why not: StaleReceipt when the message was delivered
            again or is dead, NotFound when the mailbox never had it.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """
        return await _settle(self._engine, [Ack(receipt) for receipt in receipts])


class NackMessages:
    """Give deliveries back: each comes back after a backoff, or dies after its last (svc-mailbox P-7)."""

    def __init__(self, engine: MailboxEngine, jitter: Callable[[], float] = random.random) -> None:
        """Take the engine and a source of uniform random numbers in [0, 1)."""
        self._engine = engine
        self._jitter = jitter

    async def __call__(
        self, receipts: Sequence[Receipt], *, reason: str | None = None, delay_ms: int | None = None
    ) -> list[Rejected | None]:
        """Nack deliveries by their receipts.

        Arguments:
            reason: what went wrong; it becomes the dead letter's `last_error` if this was the last attempt.
            delay_ms: hide for exactly this long instead of the policy's backoff.

        Returns, Raises: as `AckMessages`.
        """
        if delay_ms is not None and delay_ms < 0:
            raise InvalidRequest(f"delay_ms must not be negative; it was {delay_ms}.")
        return await _settle(self._engine, [Nack(r, self._jitter(), reason, delay_ms) for r in receipts])


class ExtendVisibility:
    """Hide received messages for longer, within the in-flight retention of their topic (svc-mailbox P-9)."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Hide the messages for `visibility_ms` from now on.

        Returns, Raises: as `AckMessages`.
        """
        return await _settle(self._engine, [Extend(receipt, visibility_ms) for receipt in receipts])


async def _settle(engine: MailboxEngine, commands: Sequence[Command]) -> list[Rejected | None]:
    answers = await engine.submit(commands) if commands else []
    return [answer if isinstance(answer, Rejected) else None for answer in answers]
