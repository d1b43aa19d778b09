"""The bearer of a capability on whose behalf a mailbox is called, for its owner to record and to confine."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec

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
