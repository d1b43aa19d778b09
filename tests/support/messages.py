"""Messages to send, and the mailbox of most tests; needs no package of a server."""

from postroom.application.messages import NewMessage

MAILBOX = "acme@one"


def message(payload: bytes = b"hello", topic: str = "orders", **fields: object) -> NewMessage:
    """Return a message to send."""
    return NewMessage(topic=topic, payload=payload, **fields)  # type: ignore[arg-type]
