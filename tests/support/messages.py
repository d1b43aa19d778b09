"""Messages to send, and the mailbox of most tests; needs no package of a server."""

from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage

MAILBOX = "acme@one"


def message(payload: bytes = b"hello", topic: str = "orders", **fields: object) -> NewMessage:
    """Return a message to send."""
    return NewMessage(topic=topic, payload=payload, **fields)  # type: ignore[arg-type]


async def receive_one(mailbox: Mailbox, topic: str = "orders") -> ReceivedMessage:
    """Receive the next message."""
    (received,) = await mailbox.receive_messages(topic, max_messages=1)
    return received
