"""The generation of a namespace's members under which this task chooses mailboxes (ADR 0063)."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_generation: ContextVar[int | None] = ContextVar("generation", default=None)


def current_generation() -> int | None:
    """Return the generation of the current call; None outside a namespace."""
    return _generation.get()


@contextmanager
def use_generation(generation: int) -> Iterator[None]:
    """Make calls of mailboxes under a generation."""
    token = _generation.set(generation)
    try:
        yield
    finally:
        _generation.reset(token)
