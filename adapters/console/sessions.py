"""Browser sessions: a cookie identifies a capability token that stays in the server's memory."""

import asyncio
import hmac
from collections.abc import Callable
from hashlib import sha256
from secrets import token_urlsafe
from typing import Final

import msgspec

from postroom.application.threads import wait_at_most
from postroom.domain.errors import NotFound, Saturated

MAX_SESSIONS: Final = 1_024
"""Number of sessions; at the limit, the one that was idle for longest ends."""
MAX_SESSIONS_OF_CAPABILITY: Final = 64
"""The same per capability, so that its bearer can't end the sessions of others."""
FORGET_SECONDS: Final = 10.0
CODE_SECONDS: Final = 600.0
MINUTE_SECONDS: Final = 60.0


class BrowserSession(msgspec.Struct, eq=False):
    """A browser that signed in.

    Arguments:
        token: the capability token; None for a local user.
        csrf: CSRF token that each form contains.
        last_used, started: seconds of the monotonic clock.
        id: identifier for administrators, which grants no access.
        principal: principal of the token; None without a token.
        capability: root nonce of the token, in hex; empty without a token.
        streams: number of open event streams.
        notices: sentences that the next page shows.
    """

    token: str | None
    csrf: str
    last_used: float
    started: float = 0.0
    id: str = ""
    principal: str | None = None
    capability: str = ""
    streams: int = 0
    notices: list[str] = []

    @property
    def bearer(self) -> str:
        """Return the capability, or the session's id without one."""
        return self.capability or self.id


class Sessions:
    """The sessions of all browsers, by the hash of their cookies, so that a memory dump contains no cookie.

    Arguments:
        clock: monotonic, in seconds.
        idle_seconds: time without a request after which a session ends.
    """

    def __init__(self, clock: Callable[[], float], idle_seconds: float) -> None:
        self._clock = clock
        self._idle = idle_seconds
        self._sessions: dict[bytes, BrowserSession] = {}
        """In the order of their last use."""

    def __len__(self) -> int:
        """Return the number of sessions in memory."""
        return len(self._sessions)

    def start(
        self, token: str | None, principal: str | None = None, capability: str = ""
    ) -> tuple[str, BrowserSession]:
        """Start a session; return the value of its cookie, and the session."""
        self.forget_idle()
        if capability:
            own = [key for key, each in self._sessions.items() if each.capability == capability]
            if len(own) >= MAX_SESSIONS_OF_CAPABILITY:
                del self._sessions[own[0]]
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        cookie = token_urlsafe(32)
        now = self._clock()
        session = BrowserSession(token, token_urlsafe(32), now, now, token_urlsafe(9), principal, capability)
        self._sessions[_key(cookie)] = session
        return cookie, session

    def find(self, cookie: str | None, *, touch: bool = True) -> BrowserSession | None:
        """Return the session of a cookie, or None if it has ended.

        Arguments:
            touch: whether the request restarts the idle time; the requests of a stream do not.
        """
        self.forget_idle()
        key = _key(cookie) if cookie else b""
        session = self._sessions.get(key)
        if session is not None and touch:
            session.last_used = self._clock()
            self._sessions[key] = self._sessions.pop(key)
        return session

    def end(self, cookie: str | None) -> None:
        """End the session of a cookie, if any."""
        if cookie:
            self._sessions.pop(_key(cookie), None)

    def sessions(self) -> list[BrowserSession]:
        """Return the sessions, most recently used first."""
        self.forget_idle()
        return [*self._sessions.values()][::-1]

    def end_by_id(self, id_: str) -> BrowserSession:
        """End a session by its id, and return it.

        Raises: NotFound if no session has the id.
        """
        for key, each in self._sessions.items():
            if each.id == id_:
                return self._sessions.pop(key)
        raise NotFound("The session has already ended.")

    def age(self, moment: float) -> int:
        """Return the time since a moment of the monotonic clock, in µs."""
        return int((self._clock() - moment) * 1_000_000)

    async def run(self, stopping: asyncio.Event) -> None:
        """Forget idle sessions and their tokens every few seconds, until the service stops."""
        while not stopping.is_set():
            self.forget_idle()
            await wait_at_most(FORGET_SECONDS, stopping.wait())

    def forget_idle(self) -> None:
        """Forget the sessions that were idle for too long."""
        oldest = self._clock() - self._idle
        while self._sessions:
            key = next(iter(self._sessions))
            if self._sessions[key].last_used >= oldest:
                break
            del self._sessions[key]


class OneTimeCode:
    """A code in a link that starts one session, within ten minutes.

    Arguments:
        clock: monotonic, in seconds.
        token: token of the session; None for a local user.
    """

    def __init__(self, clock: Callable[[], float], token: str | None = None) -> None:
        self.text = token_urlsafe(24)
        self.token = token
        self._clock = clock
        self._until = clock() + CODE_SECONDS
        self._is_used = False

    def can_use(self, text: object) -> bool:
        """Return whether a text is the code, which is unused and has not expired."""
        return same(self.text, text) and not self._is_used and self._clock() <= self._until

    def use(self, text: object) -> bool:
        """Use the code; return whether that was possible."""
        if not self.can_use(text):
            return False
        self._is_used = True
        return True


class SignInThrottle:
    """Limit of the failed sign-ins in a minute, for each combination of capability and address.

    Nobody can guess a token by many attempts, or lock out the holders of other tokens by them.

    Arguments:
        clock: monotonic, in seconds.
        maximum: failures in a minute.
    """

    def __init__(self, clock: Callable[[], float], maximum: int) -> None:
        self._clock = clock
        self._maximum = maximum
        self._failures: dict[tuple[str, str], list[float]] = {}
        """Times, oldest first, with the combination that failed last at the end."""

    def check(self, capability: str, address: str) -> None:
        """Raise Saturated when there were too many failures."""
        failures = self._latest((capability, address))
        if len(failures) >= self._maximum:
            seconds = failures[0] + MINUTE_SECONDS - self._clock()
            raise Saturated(
                f"There were {len(failures)} failed attempts to sign in within a minute; try again in "
                f"{seconds:.0f} s.",
                max(1, int(seconds * 1_000)),
            )

    def note_failure(self, capability: str, address: str) -> None:
        """Count a failure."""
        key = capability, address
        self._failures[key] = [*self._latest(key), self._clock()]
        if len(self._failures) > MAX_SESSIONS:
            del self._failures[next(iter(self._failures))]

    def _latest(self, key: tuple[str, str]) -> list[float]:
        """Return the failures of the last minute, and forget older ones."""
        oldest = self._clock() - MINUTE_SECONDS
        failures = [each for each in self._failures.pop(key, []) if each > oldest]
        if failures:
            self._failures[key] = failures
        return failures


def same(secret: str, other: object) -> bool:
    """Compare a secret with a form's value in constant time."""
    return isinstance(other, str) and hmac.compare_digest(secret.encode(), other.encode("utf-8", "replace"))


def _key(cookie: str) -> bytes:
    return sha256(cookie.encode("utf-8", "replace")).digest()
