"""Sessions of browsers: a cookie stands for a capability token, which stays in the memory of the server."""

import hmac
from collections.abc import Callable
from hashlib import sha256
from secrets import token_urlsafe
from typing import Final

import msgspec

from postroom.domain.errors import NotFound

MAX_SESSIONS: Final = 1_024
"""Number of sessions above which the one that was idle for longest ends."""
CODE_SECONDS: Final = 600.0


class BrowserSession(msgspec.Struct, eq=False):
    """A browser that signed in.

    Arguments:
        token: the capability token; None for a caller who needs none.
        csrf: text that each form of its pages contains.
        last_used, started: seconds of the monotonic clock.
        id: names it to administrators; it opens nothing.
        principal: to whom the token was issued, since the first request; None without a token.
        capability: root nonce of the token, in hex, since the first request; empty without one.
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

    def start(self, token: str | None) -> tuple[str, BrowserSession]:
        """Start a session; return the value of its cookie, and the session."""
        self._remove_idle()
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[min(self._sessions, key=lambda key: self._sessions[key].last_used)]
        cookie = token_urlsafe(32)
        now = self._clock()
        session = BrowserSession(token, token_urlsafe(32), now, now, token_urlsafe(9))
        self._sessions[_key(cookie)] = session
        return cookie, session

    def find(self, cookie: str | None, *, touch: bool = True) -> BrowserSession | None:
        """Return the session of a cookie; None if there is none or it was idle for too long.

        Arguments:
            touch: begin the idle time anew; a stream, which asks by itself, does not.
        """
        session = self._sessions.get(_key(cookie)) if cookie else None
        if session is None or self._clock() - session.last_used > self._idle:
            return None
        if touch:
            session.last_used = self._clock()
        return session

    def end(self, cookie: str | None) -> None:
        """End the session of a cookie, if there is one."""
        if cookie:
            self._sessions.pop(_key(cookie), None)

    def sessions(self) -> list[BrowserSession]:
        """Return the sessions, the last used first."""
        self._remove_idle()
        return sorted(self._sessions.values(), key=lambda each: -each.last_used)

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

    def _remove_idle(self) -> None:
        oldest = self._clock() - self._idle
        for key in [key for key, each in self._sessions.items() if each.last_used < oldest]:
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
