"""The bearer of a capability on whose behalf a mailbox is called, and tokens of requests (RFC 6750)."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

from postroom.domain.errors import Unauthenticated
from postroom.domain.search import topic_matches


class Caller(msgspec.Struct, frozen=True, array_like=True):
    """The bearer of a capability.

    Arguments:
        principal: to whom the capability was issued.
        capability: its root nonce, in hexadecimal.
        topics: lists of names and globs; one of each list must match a topic that it covers. Empty for a
            capability that is not limited to topics.
    """

    principal: str
    capability: str
    topics: tuple[tuple[str, ...], ...] = ()

    def covers(self, topic: str) -> bool:
        """Return whether the capability covers a topic."""
        return all(any(topic_matches(each, topic) for each in patterns) for patterns in self.topics)


_caller: ContextVar[Caller | None] = ContextVar("postroom_caller", default=None)


def current_caller() -> Caller | None:
    """Return the bearer of the capability of this call; None for a process of the mailbox's own user."""
    return _caller.get()


def is_limited() -> bool:
    """Return whether this call has a capability that is limited to topics."""
    caller = _caller.get()
    return caller is not None and bool(caller.topics)


@contextmanager
def call_as(caller: Caller | None) -> Iterator[None]:
    """Call a mailbox on behalf of the bearer of a capability, for as long as the context lasts."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


MAX_CREDENTIALS_CHARS = 5_000
_CREDENTIALS = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")


def read_bearer(values: Sequence[str]) -> str | None:
    """Return the token of a request; None if it has no credentials.

    Arguments:
        values: of its `Authorization` headers.

    Raises: Unauthenticated for several headers, and for one that is no bearer token; it is never shown.
    """
    if not values:
        return None
    if len(values) > 1:
        raise Unauthenticated("The request has several Authorization headers; send one.")
    match = _CREDENTIALS.fullmatch(values[0]) if len(values[0]) <= MAX_CREDENTIALS_CHARS else None
    if match is None:
        raise Unauthenticated("The Authorization header must be `Bearer` and a token.")
    return match[1]


def caller_covers(topic: str) -> bool:
    """Return whether the capability of the current caller covers a topic; True without a caller."""
    caller = current_caller()
    return caller is None or caller.covers(topic)
