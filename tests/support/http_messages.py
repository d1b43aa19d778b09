"""Messages over HTTP."""

import uuid
from base64 import b64encode
from typing import Any

from tests.support.servers.http import PostroomServer


def topic() -> str:
    """Return a topic of this test alone."""
    return f"t-{uuid.uuid4().hex[:12]}"


def message(name: str, payload: bytes = b"hello", **fields: Any) -> dict[str, Any]:
    """Return the body of a send."""
    return {"topic": name, "payload_b64": b64encode(payload).decode()} | fields


def send(server: PostroomServer, name: str, payload: bytes = b"hello", **fields: Any) -> str:
    """Send a message and return its id."""
    answer = server.call("POST", "/v1/send", message(name, payload, **fields))
    assert answer.status == 200, answer.text
    return str(answer.json["msg_id"])


def receive(server: PostroomServer, name: str, **fields: Any) -> list[dict[str, Any]]:
    """Receive messages."""
    answer = server.call("POST", "/v1/recv", {"topic": name} | fields)
    assert answer.status == 200, answer.text
    received: list[dict[str, Any]] = answer.json["messages"]
    return received
