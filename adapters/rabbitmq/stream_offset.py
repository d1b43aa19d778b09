"""The offset of a stream's group, stored in a queue of one message, as AMQP 0.9.1 can't store offsets."""

from aio_pika import DeliveryMode, Message
from aio_pika.abc import AbstractChannel

from postroom.adapters.rabbitmq.connection import TIMEOUT_SECONDS


class StreamOffset:
    """The next offset that a group reads from a stream.

    Arguments:
        channel: a channel with publisher confirms.
    """

    def __init__(self, channel: AbstractChannel, stream: str, group: str) -> None:
        self._channel = channel
        self._name = f"postroom.offset.{stream}.{group}"

    async def load(self) -> int | None:
        """Return the offset, or None for a new group; create the queue if it is missing."""
        queue = await self._channel.declare_queue(
            self._name, durable=True, arguments={"x-max-length": 1, "x-overflow": "drop-head"}
        )
        message = await queue.get(no_ack=False, fail=False, timeout=TIMEOUT_SECONDS)
        if message is None:
            return None
        offset = int(message.body)
        await self.store(offset)  # before the ack, so that a crash can't lose the offset
        await message.ack()
        return offset

    async def store(self, offset: int) -> None:
        """Store the offset, and return once the server has confirmed it."""
        message = Message(b"%d" % offset, delivery_mode=DeliveryMode.PERSISTENT)
        await self._channel.default_exchange.publish(message, routing_key=self._name, timeout=TIMEOUT_SECONDS)
