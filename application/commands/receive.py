"""`ReceiveMessages`: take messages of a topic for processing (svc-mailbox C-1 `RECV`)."""

import asyncio

from postroom.application.engine import MailboxEngine
from postroom.application.messages import ReceivedMessage
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Receive
from postroom.domain.policy import DEFAULT_MAX_BYTES, DEFAULT_MAX_MESSAGES

MAX_WAIT_MS = 60_000


class ReceiveMessages:
    """Deliver ready messages and hide each until it is settled or its visibility ends (svc-mailbox I-3)."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(
        self,
        topic: str,
        *,
        max_messages: int = DEFAULT_MAX_MESSAGES,
        max_bytes: int = DEFAULT_MAX_BYTES,
        visibility_ms: int | None = None,
        consumer: str | None = None,
        wait_ms: int = 0,
    ) -> list[ReceivedMessage]:
        """Receive messages of `topic`, oldest first within a shard.

        Arguments:
            max_messages: how many at most.
            max_bytes: payload bytes of all together; the first message is delivered whatever its size.
            visibility_ms: how long they stay hidden; None takes the topic's policy.
            consumer: who receives, for the record.
            wait_ms: how long to wait while there is none, up to 60,000.

        Returns: the messages, none when there were none.
        Raises: InvalidRequest, Saturated when too many are in flight, Unavailable.
        """
        if not 0 <= wait_ms <= MAX_WAIT_MS:
            raise InvalidRequest(f"wait_ms must be between 0 and {MAX_WAIT_MS}; it was {wait_ms}.")
        if max_bytes < 1:
            raise InvalidRequest(f"max_bytes must be at least 1; it was {max_bytes}.")
        command = Receive(topic, max_messages, max_bytes, visibility_ms, consumer)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1_000
        while True:
            (answer,) = await self._engine.submit([command])
            if isinstance(answer, Rejected):
                raise answer
            remaining_ms = int((deadline - loop.time()) * 1_000)
            if answer or remaining_ms <= 0:
                return [ReceivedMessage(delivered) for delivered in answer]  # type: ignore[arg-type,union-attr]
            await self._engine.wait_for_messages(topic, remaining_ms)
