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
from postroom.adapters.sockets.client_tls import ClientFiles, explain_tls_failure, make_client_context
from postroom.adapters.sockets.peers import check_socket_owner
from postroom.application.mailbox_client import MailboxClient, MailboxTransport
from postroom.application.messages import MessageDelivery, NewMessage, Sent, write_receipt
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.remote_errors import DEFAULT_RETRY_MS
from postroom.application.tracing import current_corr_id, outgoing_headers
from postroom.domain.errors import FrameTooLarge, InvalidRequest, PostroomError, Rejected, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.message import Receipt
from postroom.domain.search import EventFilter

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


BODIES = ("set_topic_policy", "preview_redrive")
"""Operations whose only argument is the body."""


class HttpTransport(MailboxTransport):
    """`MailboxTransport` over a session of an HTTP client.

    Arguments:
        where: address of the server, for errors.
    """

    max_batch_bytes = MAX_BATCH_BYTES

    def __init__(self, session: ClientSession, where: str) -> None:
        self._session = session
        self.where = where

    async def get_name(self) -> str:
        return (await self._call("GET", "/v1/mailbox", answers.Info)).mailbox

    async def send(self, message: NewMessage) -> Sent:
        answer = await self._post("/v1/send", _body(message), answers.SendResult)
        return Sent(answer.msg_id, answer.duplicate)

    async def send_batch(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        answer = await self._post("/v1/send", [_body(each) for each in messages], answers.SendResults)
        return [result.to_result() for result in answer.results]

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        body = _receive_body(command) | {"wait_ms": wait_ms}
        answer = await self._post("/v1/recv", body, answers.Deliveries)
        return [message.to_delivery() for message in answer.messages]

    async def stream(
        self, command: Receive, heartbeat_ms: int
    ) -> AsyncGenerator[list[MessageDelivery], None]:
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
        return await self._settle("/v1/ack", receipts, {})

    async def nack(
        self, receipts: Sequence[Receipt], reason: str | None, delay_ms: int | None
    ) -> list[Rejected | None]:
        return await self._settle("/v1/nack", receipts, {"reason": reason, "delay_ms": delay_ms})

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        return await self._settle("/v1/extend", receipts, {"visibility_ms": visibility_ms})

    async def ask(self, operation: Operation, arguments: Arguments) -> Any:
        """Return the result of an operation; `search_messages` gets messages without their envelopes."""
        if operation.name == "search_messages":
            query = _search_query(arguments["filter_"])
            return (await self._call("GET", operation.path, answers.FoundMessages, query=query)).to_page()
        values = {each.sent_as: arguments[each.name] for each in operation.parameters if each.is_sent}
        path = "/".join(
            _segment(values.pop(each[1:-1])) if each.startswith("{") else each
            for each in operation.path.split("/")
        )
        if operation.name == "get_message":
            return (await self._call("GET", path, answers.Detail)).to_detail()
        kind = answers.answer_of(operation)
        if operation.verb == "GET":
            return answers.result_of(operation, await self._call("GET", path, kind, query=values))
        body: object = values or None
        if operation.name in BODIES:
            (body,) = values.values()
        return answers.result_of(operation, await self._call(operation.verb, path, kind, body=body))

    async def _settle(
        self, path: str, receipts: Sequence[Receipt], options: Mapping[str, object]
    ) -> list[Rejected | None]:
        body = {"receipts": [write_receipt(receipt) for receipt in receipts], **options}
        return [
            result.to_result() for result in (await self._post(path, body, answers.SettleResults)).results
        ]

    async def _post(self, path: str, body: object, answer: type[T]) -> T:
        return await self._call("POST", path, answer, body=body)

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
        text = f"{self.where} answered {status}, and the answer is not Postroom's; check the address."
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
