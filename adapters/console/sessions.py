"""Sessions of browsers: a cookie stands for a capability token, which stays in the memory of the server."""

import asyncio
import hmac
from collections.abc import Callable
from hashlib import sha256
from secrets import token_urlsafe
from typing import Final

import msgspec

from postroom.application.background import wait_at_most
from postroom.domain.errors import NotFound

MAX_SESSIONS: Final = 1_024
"""Number of sessions above which the one that was idle for longest ends."""
MAX_SESSIONS_OF_CAPABILITY: Final = 64
"""The same of one capability, so that its bearer can't end the sessions of others."""
FORGET_SECONDS: Final = 10.0
CODE_SECONDS: Final = 600.0


class BrowserSession(msgspec.Struct, eq=False):
    """A browser that signed in.

    Arguments:
        token: the capability token; None for a caller who needs none.
        csrf: text that each form of its pages contains.
        last_used, started: seconds of the monotonic clock.
        id: names it to administrators; it opens nothing.
        principal: to whom the token was issued; None without a token.
        capability: root nonce of the token, in hex, which those attenuated from it share; empty without one.
        streams: number of open streams of events.
        notices: sentences for the next page about what was done.
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
        """Return what all sessions of one capability share; without one, the session's id."""
        return self.capability or self.id


class Sessions:
    """The sessions of all browsers, by a hash of their cookies: a dump of the memory shows no cookie.

    Arguments:
        clock: monotonic, in seconds.
        idle_seconds: time without a request after which a session ends.
    """

    def __init__(self, clock: Callable[[], float], idle_seconds: float) -> None:
        self._clock = clock
        self._idle = idle_seconds
        self._sessions: dict[bytes, BrowserSession] = {}
        """The one that was idle for longest first."""

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
        """Return the session of a cookie; None if there is none or it was idle for too long.

        Arguments:
            touch: begin the idle time anew; a stream, which asks by itself, does not.
        """
        self.forget_idle()
        key = _key(cookie) if cookie else b""
        session = self._sessions.get(key)
        if session is not None and touch:
            session.last_used = self._clock()
            self._sessions[key] = self._sessions.pop(key)
        return session

    def end(self, cookie: str | None) -> None:
        """End the session of a cookie, if there is one."""
        if cookie:
            self._sessions.pop(_key(cookie), None)

    def sessions(self) -> list[BrowserSession]:
        """Return the sessions, the last used first."""
        self.forget_idle()
        return [*self._sessions.values()][::-1]

    def end_by_id(self, id_: str) -> BrowserSession:
        """End a session, and return it.

        Raises: NotFound when there is none of this id.
        """
        for key, each in self._sessions.items():
            if each.id == id_:
                return self._sessions.pop(key)
        raise NotFound("There is no such session; it has ended already.")

    def age(self, moment: float) -> int:
        """Return the time since a moment of the sessions' clock, in µs."""
        return int((self._clock() - moment) * 1_000_000)

    async def run(self, stopping: asyncio.Event) -> None:
        """Forget the tokens of idle sessions, whether or not anybody asks, until the service stops."""
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
    """A code that starts one session, within some minutes; a link contains it.

    Arguments:
        clock: monotonic, in seconds.
        token: of the session; None for a caller who needs none.
    """

    def __init__(self, clock: Callable[[], float], token: str | None = None) -> None:
        self.text = token_urlsafe(24)
        self.token = token
        self._clock = clock
        self._until = clock() + CODE_SECONDS
        self._is_used = False

    def use(self, text: str) -> bool:
        """Use the code; return whether it is the right one, for the first time and in time."""
        is_right = hmac.compare_digest(text.encode("utf-8", "replace"), self.text.encode())
        if not is_right or self._is_used or self._clock() > self._until:
            return False
        self._is_used = True
        return True


def same(secret: str, other: object) -> bool:
    """Return whether a form has a secret, in constant time."""
    return isinstance(other, str) and hmac.compare_digest(secret.encode(), other.encode("utf-8", "replace"))


def _key(cookie: str) -> bytes:
    return sha256(cookie.encode("utf-8", "replace")).digest()
