"""The event handler port over HTTP, and the meaning of its responses (SDS-047 PORT-047-005, section 12)."""

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from contextvars import Context
from types import TracebackType
from typing import NamedTuple
from uuid import NAMESPACE_URL, uuid5

import aiohttp
import msgspec

from postroom.adapters.http.address import CheckedResolver, check_url, parse_allow_entry
from postroom.adapters.http.signature import check_keys, sign
from postroom.application.inbox.metrics import TIMEOUT_MS
from postroom.application.ports.inbox import HandlerRequest
from postroom.application.threads import cancel_and_wait
from postroom.application.tracing import current_corr_id, outgoing_headers
from postroom.domain.inbox import MAX_REASON, PROCESSED, HandlerResult

SUCCESS = frozenset({200, 201, 204})
ALREADY_PROCESSED = 409
POISON = 422


def classify_response(status: int, body: str = "", retry_after: str = "") -> HandlerResult:
    """Return the result that an HTTP response means.

    200, 201 and 204 mean processed, 409 already processed, 422 poison. Everything else is a failure and is
    retried: a redirect, 404 or 401 indicates a wrong address or key rather than a bad message, and 202
    doesn't confirm processing.

    Arguments:
        body: the beginning of the response's body.
        retry_after: the header; only a number of seconds counts.
    """
    reason = f"HTTP {status}: {body}"[:MAX_REASON] if body else f"HTTP {status}"
    if status in SUCCESS:
        return PROCESSED
    if status == ALREADY_PROCESSED:
        return HandlerResult("already_processed")
    if status == POISON:
        return HandlerResult("poison", reason)
    return HandlerResult("failed", reason, _milliseconds(retry_after))


def _milliseconds(retry_after: str) -> int | None:
    seconds = retry_after.strip()
    return int(seconds) * 1_000 if seconds.isascii() and seconds.isdecimal() and len(seconds) < 8 else None


CONNECT_TIMEOUT_SECONDS = 10
MAX_RESPONSE_BYTES = 64 << 10
SHOWN_CHARACTERS = 500
MAX_CONNECTIONS = 100
# Shorter than the idle timeout of servers (uvicorn: 5 s), so that no request is sent on a closing connection.
KEEPALIVE_SECONDS = 4


MAX_BATCH_BYTES = 256 << 10
"""Size from which requests are not added to a batch."""
ANSWER_BYTES = 2 << 10
"""Bytes that are read of a response for each request of a batch."""
OVERLOADED = frozenset({429, 503})


class _Answer(msgspec.Struct):
    """Result of one request of a batch, in the form of a response to that request alone."""

    status: int
    body: str = ""
    retry_after: int | str = ""


_decode_answers = msgspec.json.Decoder(list[_Answer]).decode


class _Waiting(NamedTuple):
    """A request that waits for the next batch, as JSON."""

    message_id: str
    item: bytes
    result: "asyncio.Future[HandlerResult]"


class HttpEventHandler:
    """Handler that is called with signed POST requests, at permitted addresses and without redirects.

    In batches, each message has an answer of its own. If a batch fails as a whole for a reason that one of
    its messages may have caused, its messages are posted again one by one.

    Arguments:
        url: URL of the handler.
        allow: permitted URLs and networks; see `parse_allow_entry`.
        keys: signing keys, the current one first.
        timeout_ms: how long the handler may take to respond.
        batch: maximum number of messages in a request; 1 posts each as it is, and not as an array.
    """

    def __init__(
        self,
        url: str,
        *,
        allow: Iterable[str],
        keys: Sequence[str | bytes],
        timeout_ms: int = TIMEOUT_MS,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        max_connections: int = MAX_CONNECTIONS,
        batch: int = 1,
    ) -> None:
        destination = check_url(url, [parse_allow_entry(entry) for entry in allow])
        self._url = destination.url
        self._shown = destination.url.with_query(None)
        self._networks = destination.networks
        self._keys = check_keys(keys)
        self._timeout_ms = timeout_ms
        self._max_response_bytes = max_response_bytes
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None
        self._batch = batch
        self._waiting: list[_Waiting] = []
        self._posts: set[asyncio.Task[None]] = set()

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """POST an event and classify the response; a missing response is a failure."""
        body, headers = msgspec.json.encode(request), outgoing_headers()
        if (corr_id := current_corr_id()) is not None:
            headers["X-Corr-Id"] = corr_id
        if self._batch > 1:
            item = b'{"request":%b,"headers":%b}' % (body, msgspec.json.encode(headers))
            return await self._handle_in_batch(request.message_id, item)
        answer = await self._post(request.message_id, body, headers, self._max_response_bytes)
        if isinstance(answer, HandlerResult):
            return answer
        status, content, retry_after = answer
        return classify_response(status, _shorten(content), retry_after)

    async def _post(
        self, id_: str, body: bytes, headers: Mapping[str, str], max_bytes: int
    ) -> tuple[int, bytes, str] | HandlerResult:
        """POST a signed body; return status, body and `Retry-After`, or the failure without a response."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity", **headers}
        headers |= sign(id_, body, int(time.time()), self._keys)
        try:
            async with self._get_session().post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as response:
                content = await _read(response, max_bytes)
                return response.status, content, response.headers.get("Retry-After", "")
        except TimeoutError:
            return HandlerResult("failed", f"{self._shown} did not respond within {self._timeout_ms:,} ms")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The text of aiohttp's own error omits why an address was refused.
            cause = getattr(error, "os_error", error)
            return HandlerResult("failed", f"{self._shown} gave no response: {str(cause) or repr(cause)}")

    # -- batches ---

    async def _handle_in_batch(self, id_: str, item: bytes) -> HandlerResult:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(id_, item, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) == 1:
            loop.call_soon(self._post_waiting)  # batches the deliveries of this turn
        return await waiting.result

    def _post_waiting(self) -> None:
        """Post the requests that wait, in batches up to the maximum number and size."""
        waiting, self._waiting = self._waiting, []
        start = size = 0
        for n, each in enumerate(waiting):
            size += len(each.item)
            if n + 1 == len(waiting) or n + 1 - start == self._batch or size >= MAX_BATCH_BYTES:
                post = self._post_batch(waiting[start : n + 1])
                # Without the context of any message.
                task = asyncio.get_running_loop().create_task(post, context=Context())
                self._posts.add(task)
                task.add_done_callback(self._posts.discard)
                start, size = n + 1, 0

    async def _post_batch(self, batch: Sequence[_Waiting]) -> None:
        """Answer the requests of a batch; after a failure that one may have caused, each on its own."""
        try:
            results, is_shared = await self._post_items(batch)
            if is_shared and len(batch) > 1:
                await asyncio.gather(*(self._post_batch([each]) for each in batch))
                return
        except Exception as error:
            for each in batch:
                if not each.result.done():
                    each.result.set_exception(error)
        else:
            for each, result in zip(batch, results, strict=True):
                if not each.result.done():
                    each.result.set_result(result)

    async def _post_items(self, batch: Sequence[_Waiting]) -> tuple[list[HandlerResult], bool]:
        """Post an array; return the results, and whether all failed for a reason that one may have caused."""
        ids = "\n".join(each.message_id for each in batch)
        body = b"[%b]" % b",".join([each.item for each in batch])
        max_bytes = max(self._max_response_bytes, ANSWER_BYTES * len(batch))
        answer = await self._post(str(uuid5(NAMESPACE_URL, ids)), body, {}, max_bytes)
        if isinstance(answer, HandlerResult):
            return [answer] * len(batch), True
        status, content, retry_after = answer
        if status != 200:
            # Even 422 says nothing about a single message: a handler that expects no array may answer it.
            failure = classify_response(500, _shorten(content), retry_after)
            reason = (failure.reason or "").replace("HTTP 500", f"HTTP {status}", 1)
            failure = msgspec.structs.replace(failure, reason=reason)
            return [failure] * len(batch), status >= 500 and status not in OVERLOADED
        try:
            answers = _decode_answers(content)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            answers, problem = [], str(error)
        else:
            problem = f"{len(answers):,} answers for {len(batch):,} messages"
        if len(answers) != len(batch):
            reason = f"{self._shown} answered a batch with no valid array: {problem}"
            failure = HandlerResult("failed", reason)
            return [failure] * len(batch), True
        return [
            classify_response(each.status, each.body[:SHOWN_CHARACTERS], str(each.retry_after))
            for each in answers
        ], False

    async def close(self) -> None:
        """Close all connections; closing twice is fine."""
        await cancel_and_wait(*self._posts)
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def __aenter__(self) -> "HttpEventHandler":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _get_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(
                resolver=CheckedResolver(self._networks),
                use_dns_cache=False,
                limit=self._max_connections,
                keepalive_timeout=KEEPALIVE_SECONDS,
            )
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(
                    total=self._timeout_ms / 1_000, sock_connect=CONNECT_TIMEOUT_SECONDS
                ),
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the beginning of the body, and read no more than the maximum size."""
    body = b""
    while len(body) < max_bytes:
        chunk = await response.content.read(max_bytes - len(body))
        if not chunk:
            break
        body += chunk
    else:
        response.close()
    return body


def _shorten(body: bytes) -> str:
    return body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")[:SHOWN_CHARACTERS].strip()
