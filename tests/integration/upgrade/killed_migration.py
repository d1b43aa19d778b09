"""Migrate a store, and be killed at a line of the code that migrates.

    python killed_migration.py STORE SET LINE

SET is `store` or `messaging`, and LINE counts the lines that run in `store_file.py` and `migrate.py`, from 1.
Without so many lines, the migration is complete, and the process ends in good order.
"""

import os
import signal
import sys
from types import FrameType
from typing import Any

from postroom.adapters.compose.maintenance import migrate_messaging, migrate_store

MIGRATING = ("sqlite/store_file.py", "postgres/migrate.py")


def main(store: str, set_: str, line: int) -> None:
    """Migrate a store up to a line."""
    left = line

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(MIGRATING):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    {"store": migrate_store, "messaging": migrate_messaging}[set_](store)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
