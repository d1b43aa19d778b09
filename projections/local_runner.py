"""The runner port in this process: no JVM, for small stores."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from postroom.application.telemetry import summarize
from postroom.projections.plan import Part
from postroom.projections.ports.runner import Key, Pair, Stage


class LocalRunner:
    """A `Runner` that runs tasks one after another in this process."""

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
            items += task(part)
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
        """Return the error of a task; see `Runner.reason`."""
        return str(error).partition("\n")[0] or summarize(error)
