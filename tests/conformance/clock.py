"""What every clock promises: a test of a clock inherits the suite and provides `clock`."""

import time

from postroom.application.ports.event_log import Clock

DAY_US = 86_400_000_000


class ClockConformance:
    def test_the_wall_clock_is_microseconds_since_1970(self, clock: Clock) -> None:
        assert isinstance(clock.wall(), int)
        assert abs(clock.wall() - time.time_ns() // 1_000) < 10 * 366 * DAY_US

    def test_uptime_never_goes_back(self, clock: Clock) -> None:
        readings = [clock.uptime() for _ in range(1_000)]
        assert readings == sorted(readings)

    def test_one_boot_has_one_id(self, clock: Clock) -> None:
        assert clock.boot() == clock.boot() != ""
