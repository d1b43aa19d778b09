"""Garbage collection in long-running processes."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exempt_heap() -> Iterator[None]:
    """Exempt the objects that exist now from garbage collection while the context lasts.

    A full collection visits every object, with the interpreter stopped: the modules, which are never garbage,
    and the queues of a mailbox, which have no cycles (ADR 0067). What is created later is collected as usual.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
