"""The order in which an owner decides what was asked at the same time; see `arrange`."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.groups import Answers, Request
from postroom.domain.mailbox.commands import Command


class Decisions:
    """Recorder of the order in which the requests of tasks were decided, the last time if more than once."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._ranks: dict[asyncio.Task[Any], int] = {}
        self._decided = 0
        self._tasks: dict[Answers, asyncio.Task[Any] | None] = {}
        self._start, decider = engine.start, engine._decider
        engine.start = self._note_request  # type: ignore[method-assign]  # of this engine alone
        for name in ("_decide_request", "_receive_together", "_execute_together"):
            setattr(decider, name, partial(self._note_decisions, getattr(decider, name)))

    def rank(self, task: asyncio.Task[Any]) -> int:
        """Return the place of a task among all of them; -1 if it asked for nothing."""
        return self._ranks.get(task, -1)

    def _note_request(self, commands: Sequence[Command], answers: Answers, *, is_plain: bool = False) -> bool:
        self._tasks[answers] = asyncio.current_task()
        return self._start(commands, answers, is_plain=is_plain)

    def _note_decisions(self, decide: Callable[..., Any], requests: Any, *others: Any) -> Any:
        for request in [requests] if isinstance(requests, Request) else requests:
            task = self._tasks.get(request.answers)
            if task is not None:
                self._ranks[task] = self._decided = self._decided + 1
        return decide(requests, *others)
