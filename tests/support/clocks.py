"""Clocks under the control of a test; all pass `tests/conformance/test_clock.py`."""


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self) -> None:
        self.wall_us = 1_800_000_000_000_000
        self.uptime_us = 60_000_000
        self.boot_id = "boot-1"

    def wall(self) -> int:
        return self.wall_us

    def uptime(self) -> int:
        return self.uptime_us

    def boot(self) -> str:
        return self.boot_id

    def advance(self, ms: int) -> None:
        """Let time pass."""
        self.wall_us += ms * 1_000
        self.uptime_us += ms * 1_000

    def reboot(self, *, after_ms: int = 0) -> None:
        """Restart the machine."""
        self.wall_us += after_ms * 1_000
        self.uptime_us = 1_000_000
        self.boot_id += "'"


class TickingClock(ManualClock):
    """A clock that moves by a millisecond at every reading, in the past of the servers' clocks."""

    def __init__(self) -> None:
        super().__init__()
        self.wall_us = 1_700_000_000_000_000

    def wall(self) -> int:
        self.advance(1)
        return super().wall()

    def uptime(self) -> int:
        self.advance(1)
        return super().uptime()


class SimulatedClock:
    """A clock of the simulation, whose wall clock can be skewed.

    Attributes:
        true: time since the simulation began, in microseconds; only the test moves it.
        skew: error of the wall clock, in microseconds.
    """

    STARTED_AT = 1_700_000_000_000_000

    def __init__(self) -> None:
        self.true = 0
        self.skew = 0
        self.boots = 1
        self._booted_at = 0

    def wall(self) -> int:
        return self.STARTED_AT + self.true + self.skew

    def uptime(self) -> int:
        return self.true - self._booted_at

    def boot(self) -> str:
        return f"boot-{self.boots}"

    def reboot(self) -> None:
        self.boots += 1
        self._booted_at = self.true
