"""Handing events to a service by HTTP (SDS-047 PORT-047-005 `EventHandler`, section 12)."""

import time
from collections.abc import Iterable, Sequence
from types import TracebackType

import aiohttp
import msgspec

from postroom.adapters.http.address import CheckedResolver, check_url, parse_allowed
from postroom.adapters.http.signature import check_keys, sign
from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.inbox import HandlerResult, result_of

TIMEOUT_MS = 60_000
CONNECT_TIMEOUT_SECONDS = 10
MAX_RESPONSE_BYTES = 64 << 10
SHOWN_CHARACTERS = 500
MAX_CONNECTIONS = 100
# Less than servers keep an idle connection (uvicorn: 5 s), else some requests meet one that is being closed.
KEEPALIVE_SECONDS = 4


class HttpEventHandler:
    """POST events to a handler, signed; to its own checked address only, and following no redirect.

    Arguments:
        url: the handler's.
        allow: URLs and networks that requests may go to; see `parse_allowed`. Nothing else is ever called.
        keys: signing keys, the current one first.
        timeout_ms: how long the handler may take to answer.
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
        destination = check_url(url, [parse_allowed(entry) for entry in allow])
        self._url = destination.url
        self._shown = destination.url.with_query(None)
        self._networks = destination.networks
        self._keys = check_keys(keys)
        self._timeout_ms = timeout_ms
        self._max_response_bytes = max_response_bytes
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def handle(self, request: HandlerRequest) -> HandlerResult:
        """POST an event and return what the handler's answer, or its silence, means."""
        body = msgspec.json.encode(request)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= sign(body, int(time.time()), self._keys)
        try:
            async with self._opened().post(
                self._url, data=body, headers=headers, allow_redirects=False
            ) as response:
                said = await self._read(response)
                retry_after_ms = _milliseconds(response.headers.get("Retry-After", ""))
                return result_of(response.status, said, retry_after_ms)
        except TimeoutError:
            return HandlerResult("failed", f"{self._shown} did not answer within {self._timeout_ms:,} ms")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = getattr(
                error, "os_error", error
            )  # aiohttp's own text leaves out why an address is refused
            return HandlerResult("failed", f"{self._shown} gave no answer: {str(cause) or repr(cause)}")

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

    def _opened(self) -> aiohttp.ClientSession:
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
        """Return how the body begins; a longer one than allowed is not read to its end."""
        body = b""
        while len(body) < self._max_response_bytes:
            chunk = await response.content.read(self._max_response_bytes - len(body))
            if not chunk:
                break
            body += chunk
        else:
            response.close()
        return body[: 4 * SHOWN_CHARACTERS].decode("utf-8", "replace")[:SHOWN_CHARACTERS].strip()


def _milliseconds(retry_after: str) -> int | None:
    seconds = retry_after.strip()
    return int(seconds) * 1_000 if seconds.isascii() and seconds.isdecimal() and len(seconds) < 8 else None
