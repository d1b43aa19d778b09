"""How long the phases of a peer take."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Measure phases in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure what the context does."""
        began = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - began, 3)
