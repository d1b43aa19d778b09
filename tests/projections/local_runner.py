"""The runner of this process, whose tasks and results are pickled, as they are between processes."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from postroom.projections import tasks
from postroom.projections.plan import Part
from postroom.projections.ports.runner import Stage


class LocalRunner(tasks.LocalTaskRunner):
    """Runs tasks one after another; what it hands over is pickled, as it is between processes."""

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a task for each part, then the stages; see `Runner.run`."""

        def run_part(part: Part) -> list[Any]:
            results: list[Any] = pickled(list(pickled(task)(part)))
            return results

        return super().run(run_part, parts, stages, progress=progress)


def pickled(value: Any) -> Any:
    """Return a value as another process would get it."""
    return pickle.loads(pickle.dumps(value))
