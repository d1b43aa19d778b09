"""Budget of the memory for bodies."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from postroom.domain.errors import Unavailable

RETRY_MS = 1_000


class BodyBudget:
    """Bound of the bytes of all bodies that are held at a time (svc-mailbox I-5).

    Arguments:
        capacity: bytes; a body that exceeds it is refused.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Hold bytes until the context ends; yield the function that takes more, which raises Unavailable."""
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self._used + count > self._capacity:
                raise Unavailable("The server holds its limit of request bodies; retry shortly.", RETRY_MS)
            self._used += count
            held += count

        try:
            yield take
        finally:
            self._used -= held
