"""The clock conformance suite on the system's clock and on those of the tests."""

import subprocess
import sys
import time

import pytest

from postroom.adapters.system.clock import SystemClock
from tests.conformance.clock import ClockConformance
from tests.support.clocks import ManualClock, SimulatedClock, TickingClock

SHOW = "from postroom.adapters.system.clock import SystemClock as C; print(C().boot(), C().uptime())"


@pytest.mark.parametrize(
    "clock",
    [SystemClock(), ManualClock(), TickingClock(), SimulatedClock()],
    ids=lambda clock: type(clock).__name__,
)
class TestClock(ClockConformance):
    pass


def test_the_wall_clock_is_that_of_the_system() -> None:
    before = time.time_ns() // 1_000
    assert before <= SystemClock().wall() <= time.time_ns() // 1_000


def test_all_processes_of_one_boot_share_uptime_and_boot_id() -> None:
    clock = SystemClock()
    before = clock.uptime()
    shown = subprocess.run(
        [sys.executable, "-c", SHOW], capture_output=True, text=True, check=True
    ).stdout.split()
    assert shown[0] == clock.boot()
    assert before <= int(shown[1]) <= clock.uptime()


@pytest.mark.parametrize("clock", [ManualClock(), SimulatedClock()], ids=lambda clock: type(clock).__name__)
def test_a_reboot_changes_the_boot_id(clock: ManualClock | SimulatedClock) -> None:
    before = clock.boot()
    clock.reboot()
    assert clock.boot() != before
