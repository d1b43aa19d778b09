"""gRPC client of a mailbox."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import grpc
import uuid_utils

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.channels import open_channel
from postroom.adapters.grpc.metadata import MAILBOX_KEY, write_text
from postroom.adapters.grpc.methods import METHODS
from postroom.adapters.grpc.redrive_client import GrpcRedrives
from postroom.adapters.grpc.status import error_of, read_error
from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.adapters.sockets.client_tls import ClientFiles
from postroom.adapters.sockets.peers import check_socket_owner
from postroom.application.correlation import current_corr_id
from postroom.application.mailbox.client import MailboxClient
from postroom.application.messages import MessageDelivery, NewMessage, Sent, write_receipt
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.tracing import outgoing_headers
from postroom.domain.errors import InvalidRequest, Rejected, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage
from postroom.domain.settings import MailboxSettings, PolicyChanges, SettingsChanges

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
        mailbox: which of several mailboxes; None takes the server's only one.

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
    """What is used of a channel."""

    def unary_unary(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with one answer."""

    def unary_stream(
        self, method: str, request_serializer: Any, response_deserializer: Any
    ) -> Callable[..., Any]:
        """Return the calls of a method with a stream of answers."""


class GrpcTransport(GrpcRedrives):
    """`MailboxTransport` over a gRPC channel.

    Arguments:
        where: address of the server, for errors.
        token: sent with each call; None sends none.
        mailbox: named in each call; None names none.
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
        """Return the name of the mailbox that answers."""
        response = await self._call("info", pb.InfoRequest())
        return str(response.mailbox)

    async def send(self, message: NewMessage) -> Sent:
        """Send a message."""
        request = pb.SendRequest()
        messages.write_new_message(message, request.message)
        response = await self._call("send", request)
        return Sent(response.message_id, response.duplicate)

    async def send_batch(self, batch: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send messages."""
        request = pb.SendBatchRequest()
        for message in batch:
            messages.write_new_message(message, request.messages.add())
        response = await self._call("send_batch", request)
        return [
            _refusal(result.error) or Sent(result.sent.message_id, result.sent.duplicate)
            for result in response.results
        ]

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        """Receive messages."""
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
        """Receive messages until the generator is closed."""
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
                # An error is a heartbeat, too: the server goes on by itself.
                yield [messages.read_delivery(message) for message in item.delivery.messages]
        finally:
            call.cancel()
        raise Unavailable(f"{self.where} ended the stream; connect again.")

    async def ack(self, receipts: Sequence[Receipt]) -> list[Rejected | None]:
        """Settle deliveries."""
        return await self._settle("ack", pb.AckRequest(receipts=_tokens(receipts)))

    async def nack(
        self, receipts: Sequence[Receipt], reason: str | None, delay_ms: int | None
    ) -> list[Rejected | None]:
        """Fail deliveries."""
        request = pb.NackRequest(receipts=_tokens(receipts), reason=reason, delay_ms=delay_ms)
        return await self._settle("nack", request)

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Extend deliveries."""
        request = pb.ExtendRequest(receipts=_tokens(receipts), visibility_ms=visibility_ms)
        return await self._settle("extend", request)

    async def redrive(
        self,
        topic: str,
        limit: int,
        reason: str | None,
        message_ids: Sequence[str] | None,
    ) -> int:
        """Redrive dead letters."""
        only = None if message_ids is None else pb.MessageIds(message_ids=message_ids)
        request = pb.RedriveRequest(topic=topic, limit=limit, reason=reason, only=only)
        return int((await self._call("redrive", request)).redriven)

    async def purge(self, topic: str, dead: bool, ready: bool) -> int:
        """Remove messages of a topic."""
        request = pb.PurgeRequest(topic=topic, dead=dead, ready=ready)
        return int((await self._call("purge", request)).removed)

    async def set_topic_policy(self, topic: str, policy: PolicyChanges) -> None:
        """Set fields of the policy of a topic."""
        unset = [name for name, value in policy.items() if value is None]
        request = pb.SetTopicPolicyRequest(topic=topic, unset=unset)
        messages.write_fields(policy, request.policy)
        await self._call("set_topic_policy", request)

    async def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox."""
        response = await self._call("get_settings", pb.GetSettingsRequest())
        return messages.read_struct(response.settings, MailboxSettings)

    async def preview_settings(self, changes: SettingsChanges, replace: bool) -> SettingsPreview:
        """Return what a change of settings would do."""
        request = pb.PreviewSettingsRequest(replace=replace)
        messages.write_result(changes, request.changes)
        return messages.read_result(await self._call("preview_settings", request), SettingsPreview)

    async def set_settings(self, changes: SettingsChanges, replace: bool) -> bool:
        """Change settings."""
        request = pb.SetSettingsRequest(replace=replace)
        messages.write_result(changes, request.changes)
        return bool((await self._call("set_settings", request)).changed)

    async def pause_topic(self, topic: str) -> None:
        """Pause a topic."""
        await self._call("pause_topic", pb.PauseTopicRequest(topic=topic))

    async def resume_topic(self, topic: str) -> None:
        """Resume a topic."""
        await self._call("resume_topic", pb.ResumeTopicRequest(topic=topic))

    async def delete_old_events(self, older_than: int) -> int:
        """Remove settled records."""
        request = pb.DeleteOldEventsRequest(older_than_us=older_than)
        return int((await self._call("delete_old_events", request)).removed)

    async def get_message(self, id_: str) -> MessageDetail:
        """Return a message with its history."""
        response = await self._call("get", pb.GetRequest(message_id=id_))
        return messages.read_result(response, MessageDetail)

    async def explain_message(self, id_: str) -> Explanation:
        """Return the explanation of a message."""
        response = await self._call("explain", pb.ExplainRequest(message_id=id_))
        return messages.read_result(response, Explanation)

    async def get_backlog(self, topic: str | None, at: Moment | None) -> Backlog:
        """Return the unsettled messages by topic and shard."""
        request = pb.BacklogRequest(topic=topic)
        if at is not None:
            messages.write_moment(at, request.at)
        return messages.read_result(await self._call("backlog", request), Backlog)

    async def list_dead_letters(
        self,
        topic: str | None,
        reason: str | None,
        limit: int,
        cursor: int,
        at: Moment | None,
    ) -> list[DeadLetter]:
        """Return a page of dead letters."""
        request = pb.ListDeadLettersRequest(topic=topic, reason=reason, limit=limit, cursor=cursor)
        if at is not None:
            messages.write_moment(at, request.at)
        response = await self._call("list_dead_letters", request)
        return [messages.read_result(each, DeadLetter) for each in response.dead_letters]

    async def get_topic_policy(self, topic: str) -> TopicPolicy | None:
        """Return the policy set for a topic."""
        response = await self._call("get_topic_policy", pb.GetTopicPolicyRequest(topic=topic))
        return TopicPolicy(**messages.set_fields(response.policy)) if response.HasField("policy") else None

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics."""
        response = await self._call("list_topics", pb.ListTopicsRequest())
        return [messages.read_result(each, TopicSummary) for each in response.topics]

    async def peek_messages(self, topic: str, limit: int) -> list[PeekedMessage]:
        """Return ready messages."""
        response = await self._call("peek", pb.PeekRequest(topic=topic, limit=limit))
        return [messages.read_result(each, PeekedMessage) for each in response.messages]

    async def search_messages(self, filter_: EventFilter) -> SearchPage:
        """Return a page of the messages that match."""
        response = await self._call("query", messages.write_filter(filter_))
        items = tuple(messages.read_item(item) for item in response.items)
        return SearchPage(items, response.next_cursor if response.HasField("next_cursor") else None)

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
            # A channel that is closed cancels its calls, but not their callers.
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
