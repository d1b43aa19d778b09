"""Port: time."""

from typing import Protocol


class Clock(Protocol):
    """The clocks of a machine, in microseconds."""

    def wall(self) -> int:
        """Return the wall clock, µs since 1970 UTC; for telemetry only (svc-mailbox C-11)."""

    def uptime(self) -> int:
        """Return µs of a monotonic clock that all processes share until a reboot (svc-mailbox I-17)."""

    def boot(self) -> str:
        """Return the id of the machine boot that `uptime` counts from."""
