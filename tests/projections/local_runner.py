"""The runner port in this process, which tests use where Spark itself is not what they are about."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from postroom.projections.plan import Part
from postroom.projections.ports.runner import Key, Pair, Stage


class LocalRunner:
    """Runs tasks one after another; what it hands over is pickled, as it is between processes."""

    def start(self) -> None:
        """Do nothing: this process runs already."""

    def run(
        self,
        task: Callable[[Part], Iterable[Any]],
        parts: Sequence[Part],
        stages: Sequence[Stage] = (),
        *,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Any]:
        """Run a task for each part, then the stages; see `Runner.run`."""
        items: list[Any] = []
        done = 0
        for part in parts:
            items += pickled(list(pickled(task)(part)))
            done += part.size
            progress(done)
        for stage in stages:
            groups: dict[Key, list[Any]] = {key: [] for key in stage.keys}
            rest = []
            for item in items:
                if isinstance(item, Pair) and item.stage == stage.name:
                    groups.setdefault(item.key, []).append(item.value)
                else:
                    rest.append(item)
            items = rest + [each for key, values in groups.items() for each in stage.task(key, values)]
        return items

    def reason(self, error: Exception) -> str:
        """Return what a task raised; see `Runner.reason`."""
        return str(error)


def pickled(value: Any) -> Any:
    """Return a value as another process would get it."""
    return pickle.loads(pickle.dumps(value))
