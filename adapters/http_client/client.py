"""HTTP client of a mailbox."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from http import HTTPStatus
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import uuid_utils
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, UnixConnector
from yarl import URL

from postroom.adapters.http_client import answers
from postroom.adapters.http_client.redrives import HttpRedrives
from postroom.adapters.sockets.client_tls import ClientFiles, explain_tls_failure, make_client_context
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
from postroom.application.remote_errors import DEFAULT_RETRY_MS
from postroom.application.tracing import outgoing_headers
from postroom.domain.errors import FrameTooLarge, InvalidRequest, PostroomError, Rejected, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter, SearchPage
from postroom.domain.settings import MailboxSettings, PolicyChanges, SettingsChanges

T = TypeVar("T")

UNIX = "unix:"
MAX_BATCH_BYTES = 1 << 19
"""Payloads and attributes of a batch: in base64 they fit into a body of 1 MiB."""
MAX_RECEIVE_BYTES = 4 << 20
MAX_LINE_BYTES = 512 << 20
"""Maximum size of a line of a stream: the largest message in base64, with its headers."""
MAX_CONNECTIONS = 256
JSON = {"Content-Type": "application/json"}


@asynccontextmanager
async def connect_http(
    address: str, *, timeout_ms: int, token: str | None = None, tls: ClientFiles
) -> AsyncIterator[MailboxClient]:
    """Use the mailbox that an HTTP server serves, for as long as the context lasts.

    Arguments:
        address: `http://host:port`, `https://host:port`, or `unix:/path`.
        timeout_ms: time for each call, besides the wait for messages.
        token: sent with each request as `Authorization: Bearer`.
        tls: certificates for `https`.

    Raises: Unavailable when the server can't be reached, InvalidRequest for a certificate that is not
        accepted.
    """
    is_unix = address.startswith(UNIX)
    if is_unix:
        check_socket_owner(address.removeprefix(UNIX))
    context = make_client_context(tls) if address.startswith("https:") else True
    # `MailboxClient` bounds each call; a long poll is silent for as long as it waits.
    async with ClientSession(
        "http://localhost" if is_unix else address,
        connector=UnixConnector(address.removeprefix(UNIX), limit=MAX_CONNECTIONS)
        if is_unix
        else TCPConnector(limit=MAX_CONNECTIONS, ssl=context),
        timeout=ClientTimeout(total=None),
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
    ) as session:
        transport = HttpTransport(session, address)
        async with MailboxClient.open(transport, timeout_ms, uuid_utils.uuid7) as client:
            yield client


_PLAIN_CRITERIA = (
    "message_id",
    "correlation_id",
    "trace_id",
    "namespace",
    "text",
    "match",
    "order",
    "limit",
    "offset",
    "cursor",
)
"""Fields of a filter that are parameters of the same name."""


class HttpTransport(HttpRedrives):
    """`MailboxTransport` over a session of an HTTP client.

    Arguments:
        where: address of the server, for errors.
    """

    max_batch_bytes = MAX_BATCH_BYTES

    def __init__(self, session: ClientSession, where: str) -> None:
        self._session = session
        self.where = where

    async def get_name(self) -> str:
        """Return the name of the mailbox that the server serves."""
        return (await self._get("/v1/mailbox", answers.Info)).mailbox

    async def send(self, message: NewMessage) -> Sent:
        """Send a message."""
        answer = await self._post("/v1/send", _body(message), answers.SendResult)
        return Sent(answer.msg_id, answer.duplicate)

    async def send_batch(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send messages."""
        answer = await self._post("/v1/send", [_body(each) for each in messages], answers.SendResults)
        return [result.to_result() for result in answer.results]

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        """Receive messages."""
        body = _receive_body(command) | {"wait_ms": wait_ms}
        answer = await self._post("/v1/recv", body, answers.Deliveries)
        return [message.to_delivery() for message in answer.messages]

    async def stream(
        self, command: Receive, heartbeat_ms: int
    ) -> AsyncGenerator[list[MessageDelivery], None]:
        """Receive messages until the generator is closed."""
        body = _receive_body(command) | {"heartbeat_ms": heartbeat_ms}
        try:
            async with self._request("POST", "/v1/recv/stream", body) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._error(response)
                line = bytearray()
                async for chunk in response.content.iter_any():
                    *ends, rest = chunk.split(b"\n")
                    for end in ends:
                        yield answers.read_line(line + end)
                        line.clear()
                    line += rest
                    if len(line) > MAX_LINE_BYTES:
                        raise self._unreadable(response.status, None)
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None  # it may contain the request's headers
        except msgspec.DecodeError:
            raise self._unreadable(HTTPStatus.OK, None) from None
        raise Unavailable(f"{self.where} ended the stream; connect again.")

    async def ack(self, receipts: Sequence[Receipt]) -> list[Rejected | None]:
        """Settle deliveries."""
        return await self._settle("/v1/ack", receipts, {})

    async def nack(
        self, receipts: Sequence[Receipt], reason: str | None, delay_ms: int | None
    ) -> list[Rejected | None]:
        """Fail deliveries."""
        return await self._settle("/v1/nack", receipts, {"reason": reason, "delay_ms": delay_ms})

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Extend deliveries."""
        return await self._settle("/v1/extend", receipts, {"visibility_ms": visibility_ms})

    async def redrive(
        self, topic: str, limit: int, reason: str | None, message_ids: Sequence[str] | None
    ) -> int:
        """Redrive dead letters."""
        body = {"topic": topic, "limit": limit, "reason": reason, "message_ids": message_ids}
        return (await self._post("/v1/dlq/reprocess", body, answers.Redriven)).redriven

    async def purge(self, topic: str, dead: bool, ready: bool) -> int:
        """Remove messages of a topic."""
        path = f"/v1/topics/{_segment(topic)}/purge"
        return (await self._post(path, {"dead": dead, "ready": ready}, answers.Removed)).removed

    async def set_topic_policy(self, topic: str, policy: PolicyChanges) -> None:
        """Set fields of the policy of a topic."""
        await self._call("PUT", f"/v1/topics/{_segment(topic)}/policy", answers.Ok, body=policy)

    async def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox."""
        return (await self._get("/v1/settings", answers.Settings)).settings

    async def preview_settings(self, changes: SettingsChanges, replace: bool) -> SettingsPreview:
        """Return what a change of settings would do."""
        body = {"changes": changes, "replace": replace}
        return await self._post("/v1/settings/preview", body, SettingsPreview)

    async def set_settings(self, changes: SettingsChanges, replace: bool) -> bool:
        """Change settings."""
        body = {"changes": changes, "replace": replace}
        return (await self._call("PUT", "/v1/settings", answers.Changed, body=body)).changed

    async def pause_topic(self, topic: str) -> None:
        """Pause a topic."""
        await self._call("PUT", f"/v1/topics/{_segment(topic)}/pause", answers.Ok)

    async def resume_topic(self, topic: str) -> None:
        """Resume a topic."""
        await self._call("PUT", f"/v1/topics/{_segment(topic)}/resume", answers.Ok)

    async def delete_old_events(self, older_than: int) -> int:
        """Remove settled records."""
        return (await self._post("/v1/log/delete", {"older_than_us": older_than}, answers.Removed)).removed

    async def get_message(self, id_: str) -> MessageDetail:
        """Return a message with its history."""
        return (await self._get(f"/v1/messages/{_segment(id_)}", answers.Detail)).to_detail()

    async def explain_message(self, id_: str) -> Explanation:
        """Return the explanation of a message."""
        return await self._get(f"/v1/messages/{_segment(id_)}/explanation", Explanation)

    async def get_backlog(self, topic: str | None, at: Moment | None) -> Backlog:
        """Return the unsettled messages by topic and shard."""
        return await self._get("/v1/backlog", Backlog, {"topic": topic, "at": at})

    async def list_dead_letters(
        self, topic: str | None, reason: str | None, limit: int, cursor: int, at: Moment | None
    ) -> list[DeadLetter]:
        """Return a page of dead letters."""
        query = {"topic": topic, "reason": reason, "limit": limit, "cursor": cursor, "at": at}
        return (await self._get("/v1/dlq", answers.DeadLetters, query)).items

    async def get_topic_policy(self, topic: str) -> TopicPolicy | None:
        """Return the policy set for a topic."""
        return (await self._get(f"/v1/topics/{_segment(topic)}/policy", answers.Policy)).policy

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics."""
        return (await self._get("/v1/topics", answers.Topics)).topics

    async def peek_messages(self, topic: str, limit: int) -> list[PeekedMessage]:
        """Return ready messages."""
        answer = await self._get("/v1/peek", answers.PeekedMessages, {"topic": topic, "limit": limit})
        return answer.messages

    async def search_messages(self, filter_: EventFilter) -> SearchPage:
        """Return a page of the messages that match, without their envelopes."""
        return (await self._get("/v1/messages", answers.FoundMessages, _search_query(filter_))).to_page()

    async def _settle(
        self, path: str, receipts: Sequence[Receipt], options: Mapping[str, object]
    ) -> list[Rejected | None]:
        body = {"receipts": [write_receipt(receipt) for receipt in receipts], **options}
        return [
            result.to_result() for result in (await self._post(path, body, answers.SettleResults)).results
        ]

    async def _post(self, path: str, body: object, answer: type[T]) -> T:
        return await self._call("POST", path, answer, body=body)

    async def _get(self, path: str, answer: type[T], query: Mapping[str, object] | None = None) -> T:
        return await self._call("GET", path, answer, query=query or {})

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> T:
        try:
            async with self._request(method, path, body, query) as response:
                if response.status == HTTPStatus.OK:
                    return answers.read_answer(await response.read(), answer)
                raise await self._error(response)
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None  # it may contain the request's headers
        except msgspec.DecodeError:
            raise self._unreadable(HTTPStatus.OK, None) from None

    def _request(
        self, method: str, path: str, body: object, query: Mapping[str, object] | None = None
    ) -> AbstractAsyncContextManager[ClientResponse]:
        return self._session.request(
            method,
            URL(path, encoded=True),
            params=[*_parameters(query or {})],
            data=None if body is None else BytesIO(msgspec.json.encode(body)),  # bytes above 1 MiB warn
            headers=_headers(body),
            allow_redirects=False,
        )

    async def _error(self, response: ClientResponse) -> PostroomError:
        """Return the error that an answer describes."""
        try:
            return answers.read_answer(await response.read(), answers.Problem).to_error()
        except msgspec.DecodeError:
            return self._unreadable(response.status, response.headers.get("Retry-After"))

    def _unreachable(self, error: Exception) -> PostroomError:
        failure = _find_tls_error(error)
        if failure is not None and (text := explain_tls_failure(str(failure), self.where)):
            return InvalidRequest(text)
        reason = str(error) or type(error).__name__
        return Unavailable(
            f"{self.where} can't be reached, or the connection was lost ({reason}); "
            "whether the call took effect is unknown."
        )

    def _unreadable(self, status: int, retry_after: str | None) -> PostroomError:
        """Return the error of an answer that is not the contract's, as of a proxy in between."""
        text = f"{self.where} answered {status} with what is no answer of a mailbox; check the address."
        if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            return FrameTooLarge(text)
        if status == HTTPStatus.TOO_MANY_REQUESTS or status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            is_seconds = retry_after is not None and retry_after.isdecimal()
            return Unavailable(text, int(retry_after or 0) * 1_000 if is_seconds else DEFAULT_RETRY_MS)
        return InvalidRequest(text)


def _headers(body: object) -> dict[str, str]:
    headers = {} if body is None else dict(JSON)
    if (corr_id := current_corr_id()) is not None:
        headers["X-Corr-Id"] = corr_id
    return headers | outgoing_headers()


def _receive_body(command: Receive) -> dict[str, Any]:
    return {
        "topic": command.topics,
        "max_messages": command.max_messages,
        "max_bytes": min(command.max_bytes, MAX_RECEIVE_BYTES),
        "visibility_ms": command.visibility_ms,
        "consumer": command.consumer,
        "with_envelope": True,
    }


def _body(message: NewMessage) -> dict[str, Any]:
    """Return the body of a send; fields with their default values are left out."""
    body: dict[str, Any] = {
        name: value
        for name in NewMessage.__struct_fields__
        if name not in ("payload", "attrs") and (value := getattr(message, name)) is not None
    }
    body["payload_b64"] = message.payload
    body["attrs"] = {name: value for name, value in message.attrs.items() if isinstance(value, str)}
    body["attrs_b64"] = {name: value for name, value in message.attrs.items() if isinstance(value, bytes)}
    return body


def _find_tls_error(error: Exception) -> ssl.SSLError | None:
    """Return the TLS error in an error of the HTTP library."""
    for each in (error, getattr(error, "os_error", None), error.__cause__):
        if isinstance(each, ssl.SSLError):
            return each
    return None


def _segment(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")  # `.` and `..` are names here, not folders


def _parameters(query: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a query: those of a list several times, those that are None not at all."""
    for name, value in query.items():
        for each in value if isinstance(value, list) else [value]:
            if each is not None:
                yield name, each.isoformat() if isinstance(each, datetime) else str(each)


def _search_query(filter_: EventFilter) -> dict[str, object]:
    return {
        "start_time": filter_.start_time,
        "end_time": filter_.end_time,
        "topics": [*filter_.topics],
        "principals": [*filter_.principals],
        "statuses": [status.name.lower() for status in filter_.statuses],
        **{f"headers[{name}]": value for name, value in filter_.headers.items()},
        **{name: getattr(filter_, name) for name in _PLAIN_CRITERIA},
    }
