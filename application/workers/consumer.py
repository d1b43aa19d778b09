"""What a worker registers for a topic."""

from typing import NamedTuple

from postroom.application.workers.handler import Handler, Middleware


class Consumer(NamedTuple):
    """A handler and the topics that it consumes; times in ms.

    Arguments:
        topic: name of a topic, or a pattern.
        timeout_ms: time limit of the handler; None for none.
    """

    topic: str
    is_pattern: bool
    handler: Handler
    middlewares: tuple[Middleware, ...]
    concurrency: int
    timeout_ms: int | None
    visibility_ms: int
