"""Target: what a client of a mailbox's local socket writes, and what its owner answers."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.local import protocol
from postroom.adapters.local.protocol import FRAME_BYTES, Frames, MalformedFrame, Query, Receiving, frame
from postroom.adapters.local.server import LocalServer, listening
from postroom.application.mailbox.groups import Answers
from postroom.application.messages import MessageDelivery
from postroom.application.remote_errors import ProblemBrief
from postroom.domain.errors import InternalError, PostroomError, Unavailable
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Purge,
    Receive,
    Redrive,
    Send,
    SetPolicy,
)
from postroom.domain.message import Headers, Receipt
from postroom.domain.policy import TopicPolicy
from tests.fuzz.services import MAILBOX, MailboxCalls

SECONDS = 30
"""Deadline of an answer."""
_RECEIPT = Receipt(b"m" * 16, 1, 1)
_COMMANDS = [
    Send(b"m" * 16, "orders", 2, b"h" * 32, b"c" * 32, Headers(0), b"envelope", idem_key="key"),
    Ack(_RECEIPT),
    Nack(_RECEIPT, 0.5, "why", 10),
    Extend(_RECEIPT, 250),
    Redrive("orders", 10),
    Purge("orders", limit=10),
    SetPolicy("orders", TopicPolicy(shards=2)),
]
_PING_ID = (1 << 40) + 7

SEEDS = [
    *(frame((number, type(each).__name__, [each])) for number, each in enumerate(_COMMANDS, 1)),
    frame((1, protocol.RECEIVE, Receiving(Receive(("orders",), 5, 1_000, None, "c"), 10))),
    frame((2, protocol.FIND_ID, b"m" * 16)),
    frame((3, protocol.QUERY, Query("get_backlog", ["orders"], {"at": 3}))),
    frame((4, protocol.QUERY, Query("list_dead_letters", [], {"limit": 5, "cursor": 1}))),
    frame((5, protocol.QUERY, Query("get_message", ["0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01"], {}))),
    frame((6, protocol.QUERY, Query("delete_old_events", [1], {}))),
    frame((0, protocol.PING, None)) + frame((0, protocol.CANCEL, 1)),
    frame((1, None, [(b"m" * 16, True), 3])),
    frame((2, ProblemBrief(429, "E_SATURATED", "full", 100), None)),
    frame(protocol.Hello(1, MAILBOX)),
]


def _frame_of(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


BOMBS = [
    _frame_of(b"\x91" * (1 << 20)),  # arrays in arrays
    _frame_of(b"\x81\xa1a" * 300_000),  # maps in maps
    _frame_of(b"\x93\x01\xa5query" + b"\x93\xabget_backlog" + b"\x91" * 500_000),
    _frame_of(b"\x93\x01\xa3Ack\xdd\xff\xff\xff\xff"),  # an array that claims 4 Gi items
    _frame_of(b"\x93\x01\xa3Ack\xc6\xff\xff\xff\xff"),
    FRAME_BYTES.to_bytes(4, "big"),
    (FRAME_BYTES + 1).to_bytes(4, "big"),
]


class _Engine:
    """The engine of a mailbox, which notes errors that it should not raise."""

    def __init__(self, mailbox: OwnedMailbox, failures: list[BaseException]) -> None:
        self._mailbox = mailbox
        self._failures = failures
        self.engine = self

    def start(self, commands: Sequence[Command], answers: Answers) -> bool:
        return self._mailbox.engine.start(commands, answers)

    def is_deliverable(self, topics: Sequence[str]) -> bool:
        return self._mailbox.engine.is_deliverable(topics)

    def release(self, deliveries: Sequence[MessageDelivery]) -> None:
        self._mailbox.engine.release(deliveries)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._mailbox.engine, name, None) or getattr(self._mailbox, name)

        async def noted(*arguments: Any, **options: Any) -> Any:
            try:
                return await call(*arguments, **options)
            except (InternalError, Unavailable) as error:
                self._failures.append(error)
                raise
            except PostroomError:
                raise
            except TypeError as error:  # a query with other arguments than it has
                if "argument" not in str(error):
                    self._failures.append(error)
                raise
            except Exception as error:
                self._failures.append(error)
                raise

        return noted


class _Outboxes:
    """The relays of an owner without databases."""

    def add(self, addresses: Sequence[str]) -> None:
        """Relay nothing."""


class _Owner(MailboxCalls):
    """A mailbox whose owner listens at a socket."""

    def __init__(self, runner: asyncio.Runner) -> None:
        super().__init__(runner)
        self._failures: list[Any] = []
        runner.get_loop().set_exception_handler(lambda _, context: self._failures.append(context))

    def call(self, data: bytes) -> None:
        """Check that the owner answers or ends the connection, and that a client reads or refuses replies."""
        _check_replies(data)
        self._runner.run(self._send(data))
        failures, self._failures[:] = list(self._failures), []
        assert not failures, failures
        assert self._runner.run(self._mailbox.receive_messages("nothing")) == []

    async def serve(self, mailbox: OwnedMailbox, opened: AsyncExitStack) -> None:
        self._mailbox = mailbox
        self._path = Path(opened.enter_context(TemporaryDirectory())) / "socket"
        server: LocalServer = await opened.enter_async_context(listening(self._path, MAILBOX, None))
        server.serve(_Engine(mailbox, self._failures), _Outboxes())

    async def _send(self, data: bytes) -> None:
        """Write data and read until the answer to a ping behind it, or the end of the connection."""
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_unix_connection(str(self._path))
            try:
                writer.write(data)
                if _ends_with_frame(data):
                    writer.write(frame((_PING_ID, protocol.PING, None)))
                else:
                    writer.write_eof()
                frames, end = Frames(), msgspec.msgpack.encode((_PING_ID, None, None))
                while chunk := await reader.read(1 << 16):
                    if end in frames.feed(chunk):
                        break
            except ConnectionError:
                pass  # the owner has closed it
            finally:
                writer.close()


def _ends_with_frame(data: bytes) -> bool:
    start = 0
    while start + 4 <= len(data):
        start += 4 + int.from_bytes(data[start : start + 4], "big")
    return start == len(data)


def _check_replies(data: bytes) -> None:
    """Check that what an owner might answer is read or refused, as its client does."""
    try:
        for body in Frames().feed(data):
            _, error, result = protocol.read_reply(body)
            if error is not None:
                protocol.read_error(error)
            for read in (protocol.read_answers, protocol.read_deliveries, protocol.read_text):
                read(result)
    except MalformedFrame:
        pass


opened = _Owner.opened
