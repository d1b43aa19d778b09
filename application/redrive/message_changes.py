"""Changes of single messages by their ids: cancelling and rescheduling."""

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime

from postroom.application.caller import caller_covers
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.ports.event_log import Answer
from postroom.application.queries.get_message import read_message
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import ChangeOutcome, MessageChange, check_due
from postroom.domain.arguments import check_ids, check_int, check_optional_text
from postroom.domain.errors import InvalidRequest, NotFound, Rejected
from postroom.domain.mailbox.commands import Cancel, Command, Reschedule
from postroom.domain.message import DEAD, MS
from postroom.domain.names import message_stream
from postroom.domain.policy import DAY_MS, MAX_DURATION_MS


class MessageChanges:
    """The changes of single messages by their ids, for the owner."""

    _engine: MailboxEngine

    async def cancel_messages(
        self, ids: Sequence[str], *, reason: str | None = None, principal: str | None = None
    ) -> list[MessageChange]:
        """Remove unsettled messages; see `Mailbox.cancel_messages`."""
        check_optional_text("reason", reason)
        return await self._change(ids, lambda stream: Cancel(stream, reason, principal))

    async def reschedule_messages(
        self,
        ids: Sequence[str],
        *,
        deliver_after_ms: int | None = None,
        at: datetime | None = None,
        principal: str | None = None,
    ) -> list[MessageChange]:
        """Change when waiting messages may be delivered; see `Mailbox.reschedule_messages`."""
        if (deliver_after_ms is None) == (at is None):
            raise InvalidRequest(
                "reschedule_messages takes either deliver_after_ms or at; pass deliver_after_ms=0 for now."
            )
        delay_ms = check_int("deliver_after_ms", deliver_after_ms or 0, 0, MAX_DURATION_MS)
        due = None if at is None else to_us(check_due(at))
        if due is not None and due > self._engine.now() + MAX_DURATION_MS * MS:
            raise InvalidRequest(f"at must be within {MAX_DURATION_MS // DAY_MS:,} days; it was {at}.")
        return await self._change(ids, lambda stream: Reschedule(stream, delay_ms, principal, due))

    async def _change(self, ids: Sequence[str], command: Callable[[bytes], Command]) -> list[MessageChange]:
        checked = check_ids("ids", ids)
        streams = [await self._find(each) for each in checked]
        commands = [command(stream) for stream in streams if stream is not None]
        answers = iter(await self._engine.submit(commands) if commands else ())
        return [
            MessageChange(id_, "unknown" if stream is None else self._outcome(stream, next(answers)))
            for id_, stream in zip(checked, streams, strict=True)
        ]

    async def _find(self, id_: str) -> bytes | None:
        """Return the stream of the message that the caller means by an id, or None."""
        stream = message_stream(self._engine.name, id_)
        message = self._engine.mailbox.messages.get(stream)
        if message is not None and caller_covers(message.topic):
            return stream
        try:
            sent, _ = await asyncio.to_thread(read_message, self._engine.log, id_, caller_covers)
        except NotFound:
            return None
        return sent.stream

    def _outcome(self, stream: bytes, answer: Answer) -> ChangeOutcome:
        if isinstance(answer, InvalidRequest):
            return "expires_first"
        if isinstance(answer, Rejected):
            raise answer
        if answer:
            return "changed"
        message = self._engine.mailbox.messages.get(stream)
        if message is None:
            return "settled"
        return "dead" if message.status == DEAD else "in_flight"
