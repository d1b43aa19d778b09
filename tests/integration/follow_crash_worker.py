"""A follower that kills itself at one point: `follow_crash_worker.py STORE METHOD before|after CALL [INTO]`.

The method is one of `SqlReadModelUpdater` or, with a target, of `Revision` or `ClickHouseReadModelUpdater`;
`CALL` counts from 1.
"""

import os
import signal
import sys
from typing import Any

from postroom.adapters.compose.projections import make_follower
from postroom.adapters.compose.store import open_store
from postroom.adapters.sql.read_model_updater import SqlReadModelUpdater

EVENTS_OF_A_BATCH = 7


def crash_at(class_: type, method: str, when: str, call: int) -> None:
    """End the process before or after a call of a method."""
    real = getattr(class_, method)
    calls = 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = real(*arguments, **options)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(class_, method, counted)


def main() -> None:
    store, method, when, call, *target = sys.argv[1:]
    crash_at(_class_with(method) if target else SqlReadModelUpdater, method, when, int(call))
    into = target[0] if target else None
    make_follower(open_store(store), max_events=EVENTS_OF_A_BATCH, into=into).advance()


def _class_with(method: str) -> type:
    from postroom.adapters.clickhouse.read_model_updater import ClickHouseReadModelUpdater
    from postroom.adapters.clickhouse.revision import Revision

    return Revision if hasattr(Revision, method) else ClickHouseReadModelUpdater


if __name__ == "__main__":
    main()
