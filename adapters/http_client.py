"""HTTP client of a mailbox."""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import datetime
from functools import cache, partial
from http import HTTPStatus
from io import BytesIO
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import uuid_utils
from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, UnixConnector
from yarl import URL

from postroom.adapters.sockets.address import check_socket_owner
from postroom.adapters.sockets.tls import ClientFiles, explain_tls_failure, make_client_context
from postroom.application.mailbox.settle import NackOptions
from postroom.application.mailbox_client import MailboxClient, MailboxTransport
from postroom.application.messages import MessageDelivery, MessageResult, NewMessage, Sent, write_receipt
from postroom.application.operations import contract, query_contract
from postroom.application.operations.contract import Delivery, Ok
from postroom.application.operations.operation import Arguments, Operation
from postroom.application.page import Page
from postroom.application.remote_errors import DEFAULT_RETRY_MS, ProblemBrief
from postroom.application.tracing import current_corr_id, outgoing_headers
from postroom.domain.errors import FrameTooLarge, InvalidRequest, PostroomError, Rejected, Unavailable
from postroom.domain.mailbox.commands import Receive
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter

T = TypeVar("T")
R = TypeVar("R")

UNIX = "unix:"
MAX_BATCH_BYTES = 1 << 19
"""Payloads and attributes of a batch: in base64 they fit into a body of 1 MiB."""
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


class Line(msgspec.Struct, frozen=True):
    """Line of a stream without a delivery: a heartbeat, or the error with which the server ends it."""

    heartbeat: str | None = None
    error: ProblemBrief | None = None


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
        return await self._call("GET", "/v1/mailbox", query_contract.ReadInfo, lambda answer: answer.mailbox)

    async def send(self, message: NewMessage) -> Sent:
        body, kind = contract.Send.of(message), contract.SendResult
        return await self._call("POST", "/v1/send", kind, kind.to_sent, body=body)

    async def send_batch(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        body, kind = [contract.Send.of(each) for each in messages], contract.SendAnswers
        return await self._call("POST", "/v1/send", kind, kind.to_results, body=body)

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        body, kind = contract.Recv(**_receive_fields(command), wait_ms=wait_ms), contract.Deliveries
        return await self._call("POST", "/v1/recv", kind, kind.to_deliveries, body=body)

    async def stream(
        self, command: Receive, heartbeat_ms: int
    ) -> AsyncGenerator[list[MessageDelivery], None]:
        body = contract.RecvStream(**_receive_fields(command), heartbeat_ms=heartbeat_ms)
        try:
            async with self._request("POST", "/v1/recv/stream", body) as response:
                if response.status != HTTPStatus.OK:
                    raise await self._error(response)
                line = bytearray()
                async for chunk in response.content.iter_any():
                    *ends, rest = chunk.split(b"\n")
                    for end in ends:
                        yield read_line(line + end)
                        line.clear()
                    line += rest
                    if len(line) > MAX_LINE_BYTES:
                        raise self._unreadable(response.status, None)
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None  # its text may contain the request's headers
        except (msgspec.DecodeError, ValueError):
            raise self._unreadable(HTTPStatus.OK, None) from None
        raise Unavailable(f"{self.where} ended the stream; connect again.")

    async def ack(
        self, receipts: Sequence[Receipt], results: Mapping[Receipt, MessageResult] = {}
    ) -> list[Rejected | None]:
        values = (results.get(each) for each in receipts) if results else ()
        sent = [None if each is None else contract.Result(*msgspec.structs.astuple(each)) for each in values]
        return await self._settle("/v1/ack", contract.AckMany(_tokens(receipts), sent or None))

    async def nack(self, receipts: Sequence[Receipt], options: NackOptions) -> list[Rejected | None]:
        return await self._settle("/v1/nack", contract.NackMany(_tokens(receipts), *options))

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        return await self._settle("/v1/extend", contract.ExtendMany(_tokens(receipts), visibility_ms))

    async def ask(self, operation: Operation, arguments: Arguments) -> Any:
        """Return the result of an operation; `search_messages` gets messages without their envelopes."""
        if operation.name == "search_messages":
            query = _search_query(arguments["filter_"])
            page = query_contract.FoundMessages
            return await self._call("GET", operation.path, page, page.to_page, query=query)
        stated = operation.stated(arguments)
        parameters = (each for each in operation.parameters if each.is_sent and each.name in stated)
        values = {each.sent_as: stated[each.name] for each in parameters}
        path = "/".join(
            _segment(values.pop(each[1:-1])) if each.startswith("{") else each
            for each in operation.path.split("/")
        )
        if operation.name == "get_message":
            detail = query_contract.ReadDetail
            return await self._call("GET", path, detail, detail.to_detail)
        answer, read = answer_of(operation), partial(result_of, operation)
        if operation.verb in ("GET", "DELETE"):
            return await self._call(operation.verb, path, answer, read, query=values)
        body: object = values or None
        if operation.name in BODIES:
            (body,) = values.values()
        return await self._call(operation.verb, path, answer, read, body=body)

    async def _settle(self, path: str, body: object) -> list[Rejected | None]:
        kind = contract.SettleResults
        return await self._call("POST", path, kind, kind.to_results, body=body)

    async def _call(
        self,
        method: str,
        path: str,
        answer: type[T],
        read: Callable[[T], R],
        *,
        body: object = None,
        query: Mapping[str, object] | None = None,
    ) -> R:
        """Return the result that `read` finds in an answer."""
        try:
            async with self._request(method, path, body, query) as response:
                if response.status == HTTPStatus.OK:
                    return read(read_answer(await response.read(), answer))
                raise await self._error(response)
        except (ClientError, OSError) as error:
            raise self._unreachable(error) from None  # its text may contain the request's headers
        except (msgspec.DecodeError, ValueError):
            raise self._unreadable(HTTPStatus.OK, None) from None

    def _request(
        self, method: str, path: str, body: object, query: Mapping[str, object] | None = None
    ) -> AbstractAsyncContextManager[ClientResponse]:
        return self._session.request(
            method,
            URL(path, encoded=True),
            params=None if query is None else [*_parameters(query)],
            data=None if body is None else BytesIO(msgspec.json.encode(body)),  # bytes above 1 MiB warn
            headers=_headers(body),
            allow_redirects=False,
        )

    async def _error(self, response: ClientResponse) -> PostroomError:
        """Return the error that an answer describes."""
        try:
            return read_answer(await response.read(), ProblemBrief).to_error()
        except (msgspec.DecodeError, ValueError):
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
        """Return the error of an answer that does not follow the contract, such as a proxy's."""
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


def _receive_fields(command: Receive) -> dict[str, Any]:
    return {
        "topic": command.topics,
        "max_messages": command.max_messages,
        "max_bytes": min(command.max_bytes, contract.MAX_RECEIVE_BYTES),
        "visibility_ms": command.visibility_ms,
        "consumer": command.consumer,
        "with_envelope": True,
    }


def _tokens(receipts: Sequence[Receipt]) -> list[str]:
    return [write_receipt(each) for each in receipts]


def _find_tls_error(error: Exception) -> ssl.SSLError | None:
    """Return the TLS error in an error of the HTTP library."""
    for each in (error, getattr(error, "os_error", None), error.__cause__):
        if isinstance(each, ssl.SSLError):
            return each
    return None


def _segment(text: str) -> str:
    return quote(text, safe="").replace(".", "%2E")  # `.` and `..` are names here, not folders


def _parameters(query: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the parameters of a query: one for each value of a list, and none for a value of None."""
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


@cache
def answer_of(operation: Operation) -> Any:
    """Return the type of the answer of an operation."""
    if operation.result is type(None):
        return Ok
    if not operation.answer:
        return operation.result
    kind = operation.result
    if kind is TopicPolicy:  # null from servers before ADR 0098 for a topic with the default policy
        kind = TopicPolicy | None
    fields: list[Any] = [(operation.answer, operation.items or kind)]
    if operation.items is not None:  # some cursors are numbers in this contract
        fields.append(("next_cursor", str | int | None, None))
    return msgspec.defstruct("Answer", fields, frozen=True)


def result_of(operation: Operation, answer: Any) -> Any:
    """Return the result in an answer of an operation."""
    if isinstance(answer, Ok):
        return None
    result = getattr(answer, operation.answer) if operation.answer else answer
    if operation.items is not None:
        cursor = answer.next_cursor
        return Page(result, None if cursor is None else str(cursor))
    return TopicPolicy() if result is None else result


def read_answer(content: bytes | bytearray, kind: type[T]) -> T:
    """Return an answer.

    Raises: DecodeError when it does not follow the contract.
    """
    try:
        return msgspec.json.decode(content, type=kind)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


def read_line(line: bytes | bytearray) -> list[MessageDelivery]:
    """Return the delivery in a line of a stream; an empty list for a heartbeat.

    Raises: DecodeError or ValueError when it does not follow the contract; the error with which the server
        ends the stream.
    """
    if b'"receipt"' in line:
        return [read_answer(line, Delivery).to_delivery()]
    other = read_answer(line, Line)
    if other.error is not None:
        raise other.error.to_error()
    if other.heartbeat is None:
        raise msgspec.DecodeError("The line is neither a delivery nor a heartbeat nor an error.")
    return []
