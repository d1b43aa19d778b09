"""Callers of a mailbox over its surfaces, which cost little CPU themselves.

A request is a template filled in by slicing, and of an answer only the receipts are read: what is measured is
the owner, not its client. `OwnClient` is the product's client, for comparison.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from time import time_ns
from typing import Any, Protocol
from urllib.parse import urlsplit

import grpc
import msgspec
import uuid_utils

from postroom.adapters.compose.connect import connect
from postroom.adapters.grpc.calls import MAILBOX_KEY, METHODS
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.local import protocol
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import Saturated, Unavailable
from postroom.domain.mailbox.commands import Ack, Receive
from postroom.domain.message import Receipt
from tests.benchmarks.load.connections import HttpConnections, LocalConnection

PAYLOAD = Random(1).randbytes(200)
MAX_BYTES = 4 << 20
MARK = "idempotency-key-of-a-template"
"""Placeholder of what differs from one send to the next."""
SATURATED = (429, 503)
SATURATED_CODES = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
Token = Any
"""What acks a delivery."""


class Refused(Exception):
    """The owner is saturated: 429 or 503 in HTTP; its text tells what is."""


class Caller(Protocol):
    """What the load does; any number of calls may be in progress."""

    async def send(self) -> None:
        """Send a message of 200 bytes with an idempotency key of its own; return when it is durable."""

    async def receive(self, max_messages: int) -> Sequence[Token]:
        """Receive messages without waiting for any."""

    async def ack(self, token: Token) -> None:
        """Settle a delivery."""


OpenCaller = Callable[[str, str], Any]
"""Open a caller: of an address, for a topic."""


class _Received(msgspec.Struct):
    msg_id: str
    receipt: str


class _Messages(msgspec.Struct):
    messages: list[_Received]


class _Problem(msgspec.Struct):
    message: str


REFUSALS: dict[str, tuple[int, bytes, bytes]] = {
    "path": (404, b"/v1/nothing", b"{}"),
    "schema": (400, b"/v1/send", b'{"topic":"refused"}'),
    "token": (401, b"/v1/send", msgspec.json.encode({"topic": "refused", "payload_b64": PAYLOAD})),
    "full": (429, b"/v1/send", msgspec.json.encode({"topic": "refused.full", "payload_b64": PAYLOAD})),
}
"""Requests over HTTP that are refused: their status, path and body. That of `token` needs `NO_TOKEN`."""
NO_TOKEN = "no token"
FULL_TOPIC = "refused.full"


class HttpCaller:
    """A caller over HTTP, whose requests may also be refused."""

    def __init__(self, connections: HttpConnections, topic: str) -> None:
        self._connections = connections
        template = {"topic": topic, "idem_key": MARK, "payload_b64": PAYLOAD}
        self._send = msgspec.json.encode(template).split(MARK.encode())
        self._topic = topic
        self._keys = count(time_ns())
        self._read = msgspec.json.Decoder(_Messages).decode

    async def send(self) -> None:
        """Send a message."""
        before, after = self._send
        await self._post(b"/v1/send", b"%b%d%b" % (before, next(self._keys), after))

    async def receive(self, max_messages: int) -> Sequence[Token]:
        """Receive messages."""
        body = {"topic": self._topic, "max_messages": max_messages, "max_bytes": MAX_BYTES}
        return self._read(await self._post(b"/v1/recv", msgspec.json.encode(body))).messages

    async def ack(self, token: Token) -> None:
        """Settle a delivery."""
        body = b'{"receipt":"%b"}' % token.receipt.encode()
        await self._post(b"/v1/ack/" + token.msg_id.encode(), body)

    async def be_refused(self, kind: str) -> str:
        """Make a request of `REFUSALS`, and return its kind."""
        expected, path, body = REFUSALS[kind]
        status, content = await self._connections.post(path, body)
        if status != expected:
            raise RuntimeError(f"{path.decode()}: {status} {content[:200].decode()}")
        return kind

    async def _post(self, path: bytes, body: bytes) -> bytes:
        status, content = await self._connections.post(path, body)
        if status in SATURATED:
            raise Refused(msgspec.json.decode(content, type=_Problem).message)
        if status != 200:
            raise RuntimeError(f"{path.decode()}: {status} {content[:200].decode()}")
        return content


@asynccontextmanager
async def open_http(address: str, topic: str, token: str | None = None) -> AsyncIterator[HttpCaller]:
    """Call a server over HTTP/1.1, with a connection for each call in progress."""
    url = urlsplit(address)
    async with HttpConnections.open(url.hostname or "", url.port or 0, token) as connections:
        yield HttpCaller(connections, topic)


class _ReceivedLocally(msgspec.Struct, array_like=True):
    receipt: Receipt  # the first of the fields of a delivery


class _LocalCaller:
    def __init__(self, connection: LocalConnection, topic: str) -> None:
        self._connection = connection
        factory = MessageFactory("main@local", lambda: 0, uuid_utils.uuid7)
        send = factory.from_message(NewMessage(topic=topic, payload=PAYLOAD, idem_key=MARK)).command
        before, middle, after = _split(_ENCODE([send]), send.message, MARK.encode())
        self._send = (before, middle, after)
        self._topic = topic
        self._keys = count(time_ns())

    async def send(self) -> None:
        before, middle, after = self._send
        key = b"%0*d" % (len(MARK), next(self._keys))
        await self._submit("Send", b"".join((before, uuid_utils.uuid7().bytes, middle, key, after)))

    async def receive(self, max_messages: int) -> Sequence[Token]:
        command = protocol.Receiving(Receive((self._topic,), max_messages, MAX_BYTES), 0)
        return _READ_RECEIVED(await self._call(protocol.RECEIVE, _ENCODE(command)))

    async def ack(self, token: Token) -> None:
        await self._submit("Ack", _ENCODE([Ack(token.receipt)]))

    async def _submit(self, kind: str, body: bytes) -> None:
        (answer,) = protocol.read_answers(await self._call(kind, body))
        if isinstance(answer, Saturated):
            raise Refused(str(answer))
        if isinstance(answer, Exception):
            raise answer

    async def _call(self, kind: str, body: bytes) -> msgspec.Raw:
        try:
            return await self._connection.call(kind, body)
        except (Saturated, Unavailable) as error:
            raise Refused(str(error)) from None


@asynccontextmanager
async def open_local(address: str, topic: str) -> AsyncIterator[Caller]:
    """Call the owner of a mailbox at its local socket, over one connection, as a process does."""
    async with LocalConnection.open(Path(address)) as connection:
        yield _LocalCaller(connection, topic)


class _GrpcCaller:
    def __init__(self, channel: grpc.aio.Channel, topic: str, mailbox: str | None = None) -> None:
        self._calls: dict[str, Any] = {
            name: channel.unary_unary(METHODS[name].path) for name in ("send", "recv", "ack")
        }
        self._topic = topic
        self._keys = count(time_ns())
        self._metadata = () if mailbox is None else ((MAILBOX_KEY, mailbox),)

    async def send(self) -> None:
        message = pb.NewMessage(topic=self._topic, payload=PAYLOAD, idem_key=str(next(self._keys)))
        await self._call("send", pb.SendRequest(message=message).SerializeToString())

    async def receive(self, max_messages: int) -> Sequence[Token]:
        request = pb.RecvRequest(topics=[self._topic], max_messages=max_messages, max_bytes=MAX_BYTES)
        answer = pb.RecvResponse.FromString(await self._call("recv", request.SerializeToString()))
        return [message.receipt for message in answer.messages]

    async def ack(self, token: Token) -> None:
        answer = await self._call("ack", pb.AckRequest(receipts=[token]).SerializeToString())
        (result,) = pb.AckResponse.FromString(answer).results
        if result.HasField("error"):
            if result.error.code == Saturated.code:
                raise Refused(result.error.message)
            raise RuntimeError(f"ack: {result.error.message}")

    async def _call(self, name: str, request: bytes) -> bytes:
        try:
            answer: bytes = await self._calls[name](request, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() in SATURATED_CODES:
                raise Refused(error.details()) from None
            raise RuntimeError(f"{name}: {error.code().name}, {error.details()}") from error
        return answer


@asynccontextmanager
async def open_grpc(address: str, topic: str, mailbox: str | None = None) -> AsyncIterator[Caller]:
    """Call a server over gRPC, over one channel, with the C core's client and without our own.

    Arguments:
        mailbox: which of several mailboxes; None is the server's only one.
    """
    async with grpc.aio.insecure_channel(urlsplit(address).netloc) as channel:
        yield _GrpcCaller(channel, topic, mailbox)


class OwnClient:
    """The product's own client."""

    def __init__(self, mailbox: Mailbox, topic: str) -> None:
        self._mailbox = mailbox
        self._topic = topic
        self._keys = count(time_ns())

    async def send(self) -> None:
        """Send a message."""
        new = NewMessage(topic=self._topic, payload=PAYLOAD, idem_key=str(next(self._keys)))
        await self._mailbox.send_message(new)

    async def receive(self, max_messages: int) -> Sequence[Token]:
        """Receive messages."""
        received = await self._mailbox.receive_messages(
            self._topic, max_messages=max_messages, max_bytes=MAX_BYTES
        )
        return [message.receipt for message in received]

    async def ack(self, token: Token) -> None:
        """Settle a delivery."""
        (refusal,) = await self._mailbox.ack_messages([token])
        if refusal is not None:
            raise refusal


@asynccontextmanager
async def open_own(address: str, topic: str) -> AsyncIterator[Caller]:
    """Call by `connect`."""
    async with connect(address) as mailbox:
        yield OwnClient(mailbox, topic)


def _split(template: bytes, *marks: bytes) -> list[bytes]:
    """Return what surrounds the first occurrence of each mark, in their order."""
    parts = []
    for mark in marks:
        before, found, template = template.partition(mark)
        assert found
        parts.append(before)
    return [*parts, template]


_ENCODE = msgspec.msgpack.Encoder().encode
_READ_RECEIVED = msgspec.msgpack.Decoder(list[_ReceivedLocally]).decode
