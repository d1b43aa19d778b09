"""A follower that kills itself at one point: `follow_crash_worker.py STORE METHOD before|after CALL`.

The method is one of `postroom.projections.apply.tables.SqlTables`; `CALL` counts from 1.
"""

import os
import signal
import sys
from typing import Any

from postroom.projections.apply.tables import SqlTables
from postroom.projections.follow import Follower

EVENTS_OF_A_BATCH = 7


def crash_at(method: str, when: str, call: int) -> None:
    """End the process before or after a call of a method."""
    real = getattr(SqlTables, method)
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

    setattr(SqlTables, method, counted)


def main() -> None:
    store, method, when, call = sys.argv[1:]
    crash_at(method, when, int(call))
    Follower(store, most_events=EVENTS_OF_A_BATCH).advance()


if __name__ == "__main__":
    main()
