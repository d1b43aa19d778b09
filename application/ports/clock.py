"""Port: time."""

from typing import Protocol


class Clock(Protocol):
    """Tell the time, in microseconds."""

    def wall(self) -> int:
        """Return the wall clock, µs since 1970 UTC; for telemetry only (svc-mailbox C-11)."""

    def uptime(self) -> int:
        """Return µs on a clock that never jumps and that one boot's processes share (svc-mailbox I-17)."""

    def boot(self) -> str:
        """Return an id of the machine boot that `uptime` counts from."""
