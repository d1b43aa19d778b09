"""The clock port over the operating system's clocks."""

import time
import uuid
from functools import cache
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# On Linux, CLOCK_BOOTTIME also advances while the machine is suspended.
_UPTIME = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class SystemClock:
    """The clocks of the machine."""

    def wall(self) -> int:
        """Return µs since 1970 UTC."""
        return time.time_ns() // 1_000

    def uptime(self) -> int:
        """Return µs since the machine started."""
        return time.clock_gettime_ns(_UPTIME) // 1_000

    def boot(self) -> str:
        """Return the kernel's id of this boot; without one, an id unique to this process."""
        return _boot()


@cache
def _boot() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:
        return str(uuid.uuid4())
