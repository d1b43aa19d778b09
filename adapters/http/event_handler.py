"""The event handler port over HTTP, and the meaning of its responses (SDS-047 PORT-047-005, section 12)."""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import aiohttp
import msgspec

from postroom.adapters.http.address import CheckedResolver, check_url, parse_allow_entry
from postroom.adapters.http.signature import check_keys, sign
from postroom.application.inbox.metrics import TIMEOUT_MS
from postroom.application.ports.inbox import HandlerRequest
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


class HttpEventHandler:
    """Handler that is called with signed POST requests, at permitted addresses and without redirects.

    Arguments:
        url: URL of the handler.
        allow: permitted URLs and networks; see `parse_allow_entry`.
        keys: signing keys, the current one first.
        timeout_ms: how long the handler may take to respond.
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

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """POST an event and classify the response; a missing response is a failure."""
        body = msgspec.json.encode(request)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= outgoing_headers()
        if (corr_id := current_corr_id()) is not None:
            headers["X-Corr-Id"] = corr_id
        headers |= sign(request.message_id, body, int(time.time()), self._keys)
        try:
            async with self._get_session().post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as response:
                text = await self._read(response)
                return classify_response(response.status, text, response.headers.get("Retry-After", ""))
        except TimeoutError:
            return HandlerResult("failed", f"{self._shown} did not respond within {self._timeout_ms:,} ms")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # The text of aiohttp's own error omits why an address was refused.
            cause = getattr(error, "os_error", error)
            return HandlerResult("failed", f"{self._shown} gave no response: {str(cause) or repr(cause)}")

    async def close(self) -> None:
        """Close all connections; closing twice is fine."""
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

    async def _read(self, response: aiohttp.ClientResponse) -> str:
        """Return the beginning of the body, and read no more than the maximum size."""
        body = b""
        while len(body) < self._max_response_bytes:
            chunk = await response.content.read(self._max_response_bytes - len(body))
            if not chunk:
                break
            body += chunk
        else:
            response.close()
        return body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")[:SHOWN_CHARACTERS].strip()
