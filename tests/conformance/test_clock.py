"""What every clock promises."""

import subprocess
import sys
import time

import pytest

from postroom.adapters.system.clock import SystemClock
from postroom.application.ports.clock import Clock

SHOW = "from postroom.adapters.system.clock import SystemClock as C; print(C().boot(), C().uptime())"


@pytest.fixture(params=[SystemClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


def test_the_wall_clock_is_microseconds_since_1970(clock: Clock) -> None:
    before = time.time_ns() // 1_000
    assert before <= clock.wall() <= time.time_ns() // 1_000


def test_uptime_never_goes_back(clock: Clock) -> None:
    readings = [clock.uptime() for _ in range(1_000)]
    assert readings == sorted(readings)


def test_all_processes_of_one_boot_share_uptime_and_boot_id() -> None:
    clock = SystemClock()
    before = clock.uptime()
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown[0] == clock.boot()
    assert before <= int(shown[1]) <= clock.uptime()
