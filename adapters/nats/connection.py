"""Connections to NATS: settings, access, metrics and checks."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import Error

from postroom.adapters.nats.client import SupervisedClient
from postroom.adapters.nats.settings import NatsSettings
from postroom.application.diagnosis import Finding, clock_finding
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Metric
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait
from postroom.domain.errors import InvalidRequest, Unavailable, UnusableServer

_REFUSALS = ("authorization", "authentication", "credentials")
"""Texts in the errors with which a server refuses a user, token, certificate or signature."""


def access_options(settings: NatsSettings) -> dict[str, Any]:
    """Return the options of `Client.connect`.

    Password and token are read again for each connection, so that their files may be replaced.

    Raises: InvalidRequest when a file can't be used, MissingExtra without the package `nkeys`, which signs.
    """
    options: dict[str, Any] = {}
    for name, option in (("credentials", "user_credentials"), ("nkey", "nkeys_seed")):
        path = getattr(settings, name)
        if path is not None:
            with explain_missing_extra():
                import_module("nkeys")  # nats-py imports it only when it signs
            _read(name, path)
            options[option] = path
    for name, option in (("password_file", "password"), ("token_file", "token")):
        path = getattr(settings, name)
        if path is not None:
            _read(name, path)
            options[option] = lambda name=name, path=path: _read(name, path)
    if settings.user is not None:
        options["user"] = settings.user
    if settings.needs_tls:
        options |= {"tls": _tls_context(settings), "tls_handshake_first": settings.tls_first}
    return options


def explain(error: BaseException) -> str | None:
    """Return advice for an error that a retry would repeat, or None for other errors."""
    if isinstance(error, InvalidRequest):
        return "Check the NATS settings."
    if isinstance(error, ssl.SSLCertVerificationError):
        return "Check ca of the NATS settings, and the name and expiry of the server's certificate."
    if isinstance(error, ssl.SSLError):
        return "Check certificate and key of the NATS settings, and that the server has TLS."
    text = str(error).lower()
    if any(word in text for word in _REFUSALS):
        return "Check credentials, nkey, user, token or certificate of the NATS settings."
    return None


def _tls_context(settings: NatsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.ca)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("ca", settings.ca, error) from None
    if settings.certificate is not None:
        try:
            context.load_cert_chain(settings.certificate, settings.key, password=_refuse_password)
        except (OSError, ValueError) as error:
            raise _unusable("certificate or key", settings.certificate, error) from None
    return context


def _refuse_password() -> str:
    raise ValueError("the key has a passphrase, which is not supported")


def _read(name: str, path: str) -> str:
    try:
        text = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(name, path, error) from None
    if not text:
        raise InvalidRequest(f"The file {path} of the NATS setting {name} is empty.")
    return text


def _unusable(name: str, path: str | None, error: Exception) -> InvalidRequest:
    reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
    return InvalidRequest(f"The file {path} of the NATS setting {name} can't be used: {reason}.")


CONNECT_TIMEOUT_SECONDS = 3.0
PING_SECONDS, MAX_UNANSWERED_PINGS = 3, 2
"""A connection without data from the server for 9 s is replaced."""
ERROR_LOG_SECONDS = 30.0
"""Minimum time between two log events about errors of a connection, which tries to reconnect every 0.2 s."""


@asynccontextmanager
async def connect(
    settings: NatsSettings, name: str, reconnected: Callable[[], None] = lambda: None
) -> AsyncIterator[SupervisedClient]:
    """Connect to NATS while the context lasts; a lost or stalled connection is replaced.

    Arguments:
        name: the client's name, as the server reports it.
        reconnected: called when the connection was replaced, maybe by one to another server.

    Raises: Unavailable when no server answers, or the only one refuses the connection; InvalidRequest when a
        file of the settings can't be used, MissingExtra without the package that signs with nkeys.
    """
    options = access_options(settings)
    client = SupervisedClient(needs_tls=settings.needs_tls)
    refusal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    errors = _ErrorLog(name, settings.shown_url)
    last_error: Exception | None = None
    connected = False

    async def on_error(error: Exception) -> None:
        nonlocal last_error
        if not refusal.done():  # otherwise the refusal is the reason
            last_error = error
        if connected:
            errors.add(error)
        elif "," not in settings.url and explain(error) is not None and not refusal.done():
            refusal.set_result(None)  # no other server may accept what this one refuses

    async def on_disconnect() -> None:
        if not client.is_closed:
            logger().warning("nats.disconnected", client=name, url=settings.shown_url)

    async def on_reconnect() -> None:
        errors.log_recovery()
        reconnected()

    try:
        await _within(
            CONNECT_TIMEOUT_SECONDS,  # the client itself would retry forever
            client.connect(
                settings.url.split(","),
                name=name,
                allow_reconnect=True,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]  # it accepts fractions
                ping_interval=PING_SECONDS,
                max_outstanding_pings=MAX_UNANSWERED_PINGS,
                error_cb=on_error,
                disconnected_cb=on_disconnect,
                reconnected_cb=on_reconnect,
                **options,
            ),
            refusal,
        )
        connected = True
        yield client
    except (Error, OSError, TimeoutError) as error:
        if connected:
            raise
        reason = last_error or error
        advice = explain(reason)
        problem = "can't be reached" if advice is None else "refuses the connection"
        kind = Unavailable if advice is None else UnusableServer
        raise kind(
            f"NATS at {settings.shown_url} {problem}: {str(reason).rstrip('.') or type(reason).__name__}. "
            f"{advice or 'Check [nats] url and that the server runs.'}"
        ) from error
    finally:
        await client.close()


class _ErrorLog:
    """Log of a connection's errors: the first at once, later ones at most every 30 s, with their number.

    Arguments:
        client: the client's name.
        url: the servers, without passwords.
    """

    def __init__(self, client: str, url: str) -> None:
        self._client = client
        self._url = url
        self._total = 0
        self._logged_total = 0
        self._next_log = 0.0

    def add(self, error: Exception) -> None:
        """Count an error, and log it unless one was logged shortly before."""
        self._total += 1
        now = time.monotonic()
        if now < self._next_log:
            return
        count = self._total - self._logged_total
        logger().warning("nats.error", client=self._client, error=summarize(error), count=count)
        self._logged_total, self._next_log = self._total, now + ERROR_LOG_SECONDS

    def log_recovery(self) -> None:
        """Log that the connection was restored, and the number of errors since the last time."""
        logger().info("nats.reconnected", client=self._client, url=self._url, errors=self._total)
        self._total = self._logged_total = 0
        self._next_log = 0.0


async def _within(seconds: float, work: Coroutine[Any, Any, None], end: asyncio.Future[None]) -> None:
    """Await work until `end` or a timeout, then cancel it repeatedly: nats-py may drop a cancellation."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task, end], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise TimeoutError
        task.result()
    finally:
        await cancel_and_wait(task)


def nats_metrics(clients: Mapping[str, Client]) -> list[Metric]:
    """Return the state of connections, by their purpose."""
    connected = [({"connection": name}, float(client.is_connected)) for name, client in clients.items()]
    reconnects = [
        ({"connection": name}, float(client.stats["reconnects"])) for name, client in clients.items()
    ]
    return [
        Metric("postroom_nats_connected", "gauge", "1 for a connection to NATS that works.", connected),
        Metric("postroom_nats_reconnects", "counter", "Connections to NATS that were replaced.", reconnects),
    ]


MIN_VERSION = (2, 10)


def check_nats(settings: NatsSettings, seconds: float) -> Iterator[Finding]:
    """Check whether NATS can be reached and has JetStream, and read its clock.

    Arguments:
        seconds: deadline of each request.
    """
    yield from asyncio.run(_check(settings, seconds))


async def _check(settings: NatsSettings, seconds: float) -> list[Finding]:
    async with connect(settings, "postroom doctor") as client:
        server_version = client.connected_server_version
        text = (
            f"{settings.shown_url}: NATS {server_version.major}.{server_version.minor}.{server_version.patch}"
        )
        if (server_version.major, server_version.minor) < MIN_VERSION:
            findings = [Finding("nats", "failure", text, "Use NATS 2.10 or newer.")]
        else:
            findings = [Finding("nats", "ok", text)]
        try:
            account = await _request(client, "$JS.API.INFO", seconds)
        except (Error, TimeoutError):
            account = {}
        if "streams" not in account:
            advice = "Start the server with -js, and enable JetStream for the account."
            return [*findings, Finding("jetstream", "failure", "it is not enabled", advice)]
        advice = "Set sync_interval: always in its jetstream section; clients can't see whether it is."
        findings.append(Finding("jetstream", "ok", f"{account['streams']:,} streams", advice))
        findings += await _check_clock(client, seconds)
        return findings


async def _check_clock(client: Client, seconds: float) -> list[Finding]:
    """Return the difference between the server's clock and ours; nothing if no stream reports a time."""
    names = (await _request(client, "$JS.API.STREAM.NAMES", seconds)).get("streams")
    if not names:
        return []
    before = time.time_ns() // 1_000
    at = (await _request(client, f"$JS.API.STREAM.INFO.{names[0]}", seconds)).get("ts")
    after = time.time_ns() // 1_000
    if not isinstance(at, str):  # a server before NATS 2.10.4
        return []
    theirs = datetime.fromisoformat(at[:26].rstrip("Z") + "+00:00")  # Python reads µs, not ns
    return [clock_finding("nats clock", before, int(theirs.timestamp() * 1_000_000), after)]


async def _request(client: Client, subject: str, seconds: float) -> dict[str, Any]:
    answer = await client.request(subject, b"", timeout=seconds)
    content: dict[str, Any] = json.loads(answer.data)
    return content
