"""gRPC client of a mailbox."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import uuid_utils

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.calls import MAILBOX_KEY, METHODS, error_of, read_error, write_text
from postroom.adapters.grpc.connections import open_channel
from postroom.adapters.grpc.operations import method_name, read_answer, write_request
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.sockets.address import check_socket_owner
from postroom.adapters.sockets.tls import ClientFiles
from postroom.application.mailbox.settle import NackOptions
from postroom.application.mailbox_client import MailboxClient, MailboxTransport
from postroom.application.messages import MessageDelivery, MessageResult, NewMessage, Sent, write_receipt
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.tracing import current_corr_id, outgoing_headers
from postroom.domain.errors import InvalidRequest, Rejected, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.message import Receipt

UNIX = "unix:"
MAX_BATCH_BYTES = 1 << 19
MAX_INT32 = (1 << 31) - 1


@asynccontextmanager
async def connect_grpc(
    address: str,
    *,
    timeout_ms: int,
    token: str | None = None,
    tls: ClientFiles | None = None,
    mailbox: str | None = None,
) -> AsyncIterator[MailboxClient]:
    """Use a mailbox that a gRPC server serves, for as long as the context lasts.

    Arguments:
        address: `host:port` or `unix:/path`.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent with each call as `authorization: Bearer`.
        tls: certificates; None connects without TLS.
        mailbox: name of the mailbox, if the server has several; None takes the server's only one.

    Raises: Unavailable when the server can't be reached, InvalidRequest for a certificate that is not
        accepted, NotFound or WrongOwner when the server does not serve the mailbox.
    """
    if address.startswith(UNIX):
        check_socket_owner(address.removeprefix(UNIX))
    async with open_channel(address, tls) as channel:
        where = f"{'grpc' if tls is None else 'grpcs'}://{address}"
        transport = GrpcTransport(channel, where, token, mailbox)
        async with MailboxClient.open(transport, timeout_ms, uuid_utils.uuid7) as client:
            yield client


class CallFactory(Protocol):
    """A gRPC channel, as far as `GrpcTransport` uses it."""

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with one answer."""

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with a stream of answers."""


class GrpcTransport(MailboxTransport):
    """`MailboxTransport` over a gRPC channel.

    Arguments:
        where: address of the server, for errors.
        token: sent with each call; None sends none.
        mailbox: mailbox that each call names; None names none.
    """

    max_batch_bytes = MAX_BATCH_BYTES

    def __init__(
        self, channel: CallFactory, where: str, token: str | None = None, mailbox: str | None = None
    ) -> None:
        self.where = where
        self._sent: list[tuple[str, str]] = []
        """Metadata of every call."""
        if token is not None:
            self._sent.append(("authorization", f"Bearer {token}"))
        if mailbox is not None:
            self._sent.append((MAILBOX_KEY, write_text(mailbox)))
        self._recv_stream = channel.unary_stream(
            METHODS["recv_stream"].path,
            request_serializer=METHODS["recv_stream"].request.SerializeToString,
            response_deserializer=METHODS["recv_stream"].response.FromString,
        )
        self._calls = {
            name: channel.unary_unary(
                method.path,
                request_serializer=method.request.SerializeToString,
                response_deserializer=method.response.FromString,
            )
            for name, method in METHODS.items()
            if not method.is_stream
        }

    async def get_name(self) -> str:
        response = await self._call("info", pb.InfoRequest())
        return str(response.mailbox)

    async def send(self, message: NewMessage) -> Sent:
        request = pb.SendRequest()
        messages.write_new_message(message, request.message)
        response = await self._call("send", request)
        return Sent(response.message_id, response.duplicate)

    async def send_batch(self, batch: Sequence[NewMessage]) -> list[Sent | Rejected]:
        request = pb.SendBatchRequest()
        for message in batch:
            messages.write_new_message(message, request.messages.add())
        response = await self._call("send_batch", request)
        return [
            _refusal(result.error) or Sent(result.sent.message_id, result.sent.duplicate)
            for result in response.results
        ]

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        request = pb.RecvRequest(
            topics=command.topics,
            max_messages=min(command.max_messages, MAX_INT32),  # the server's limit is far below
            max_bytes=command.max_bytes,
            visibility_ms=command.visibility_ms,
            consumer=command.consumer,
            wait_ms=wait_ms,
        )
        response = await self._call("recv", request)
        return [messages.read_delivery(message) for message in response.messages]

    async def stream(
        self, command: Receive, heartbeat_ms: int
    ) -> AsyncGenerator[list[MessageDelivery], None]:
        call = self._recv_stream(
            pb.RecvStreamRequest(
                topics=command.topics,
                max_messages=command.max_messages,
                max_bytes=command.max_bytes,
                visibility_ms=command.visibility_ms,
                consumer=command.consumer,
                heartbeat_ms=heartbeat_ms,
            ),
            metadata=self._metadata(),
        )
        try:
            while (item := await self._within(call.read())) is not grpc.aio.EOF:
                # An error also serves as a heartbeat: the server goes on by itself.
                yield [messages.read_delivery(message) for message in item.delivery.messages]
        finally:
            call.cancel()
        raise Unavailable(f"{self.where} ended the stream; connect again.")

    async def ack(
        self, receipts: Sequence[Receipt], results: Mapping[Receipt, MessageResult] = {}
    ) -> list[Rejected | None]:
        request = pb.AckRequest(receipts=_tokens(receipts))
        for index, receipt in enumerate(receipts if results else ()):
            if receipt in results:
                messages.write_result(results[receipt], request.results[index])
        return await self._settle("ack", request)

    async def nack(self, receipts: Sequence[Receipt], options: NackOptions) -> list[Rejected | None]:
        tokens = _tokens(receipts)
        request = pb.NackRequest(receipts=tokens, reason=options.reason, delay_ms=options.delay_ms)
        if options.action != "retry":  # servers refuse unknown fields
            request.action = options.action
        if options.traceback is not None:
            request.traceback = options.traceback
        return await self._settle("nack", request)

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        request = pb.ExtendRequest(receipts=_tokens(receipts), visibility_ms=visibility_ms)
        return await self._settle("extend", request)

    async def ask(self, operation: Operation, arguments: Arguments) -> Any:
        """Return the result of an operation."""
        method = method_name(operation)
        if method not in self._calls:
            raise InvalidRequest(f"The contract postroom.v1 has no method {method}; call it over HTTP.")
        return read_answer(operation, await self._call(method, write_request(operation, arguments)))

    async def _settle(self, call: str, request: Any) -> list[Rejected | None]:
        return [_refusal(result.error) for result in (await self._call(call, request)).results]

    async def _call(self, name: str, request: Any) -> Any:
        return await self._within(self._calls[name](request, metadata=self._metadata()))

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        corr_id = current_corr_id()
        called = self._sent if corr_id is None else (*self._sent, ("x-corr-id", corr_id))
        return (*called, *outgoing_headers().items())

    async def _within(self, call: Awaitable[Any]) -> Any:
        """Return the answer of a call, or raise the error that the server or the channel reports."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise error_of(error, self.where) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Closing a channel cancels its calls, but not their callers.
            raise Unavailable(
                f"The connection to {self.where} was closed; whether the call took effect is unknown."
            ) from None


def _tokens(receipts: Sequence[Receipt]) -> list[str]:
    return [write_receipt(receipt) for receipt in receipts]


def _refusal(error: pb.Error) -> Rejected | None:
    """Return the refusal of one part of a request; None if it succeeded."""
    if not error.code:
        return None
    refusal = read_error(error)
    return refusal if isinstance(refusal, Rejected) else InvalidRequest(str(refusal))
