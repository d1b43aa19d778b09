"""Port: a runner of tasks, in this process or on a cluster."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from postroom.projections.plan import Part

Key = int | str


class Pair(NamedTuple):
    """A value that a task sends to a later stage, and the key that it is grouped by there."""

    stage: str
    key: Key
    value: Any


class Stage(NamedTuple):
    """A later step of a job, whose task receives all values of a key.

    Arguments:
        name: name of the stage in pairs.
        task: takes a key and all its values; yields results, or pairs for later stages.
        partitions: number of tasks.
        keys: keys for which the task runs even without pairs.
    """

    name: str
    task: Callable[[Any, Iterable[Any]], Iterable[Any]]
    partitions: int
    keys: tuple[Key, ...] = ()


class Runner(Protocol):
    """A runner of tasks, which retries lost ones; every adapter passes `tests/conformance/runner.py`.

    Tasks, parts and pairs are pickled: a task may run in any process, and more than once.
    """

    def start(self) -> None:
        """Start the runner, which may take seconds.

        Raises: Unavailable when it can't be started.
        """

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a task for each part, then the stages in their order, and return all results in any order.

        Arguments:
            task: takes a part; yields results, or pairs for a stage.
            progress: called repeatedly, from this thread, with the size of the parts done so far.

        Raises: an exception that `reason` explains, when a task failed.
        """

    def reason(self, error: Exception) -> str:
        """Return the cause of an error that `run` raised, in one line."""
