"""The command line on a machine whose clocks are wrong, as libfaketime makes them (svc-mailbox I-17)."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT_SECONDS

LIBRARIES = [
    *Path(sysconfig.get_path("purelib")).glob("libfaketime/vendor/libfaketime/src/libfaketime.so.1"),
    *Path("/usr/lib").glob("*/faketime/libfaketime.so.1"),
    *Path("/usr/lib/faketime").glob("libfaketime.so.1"),
]

AFTER_A_REBOOT = """
import sys
from postroom.adapters.cli.main import main
from postroom.adapters.system.clock import SystemClock

SystemClock.boot = lambda self: "another boot"
SystemClock.uptime = lambda self: 60_000_000
main()
"""


@pytest.fixture
def faketime():
    if not LIBRARIES:
        pytest.skip("libfaketime is not installed; on Debian and Ubuntu: apt-get install libfaketime")

    def environment(offset):
        # libfaketime moves the monotonic clock along, unlike a wall clock that is set.
        return {"LD_PRELOAD": str(LIBRARIES[0]), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}

    return environment


@pytest.fixture
def rebooted(postroom):
    """Run a command as if the machine had been restarted a minute ago."""

    def run(*arguments, **environment):
        return subprocess.run(
            [sys.executable, "-c", AFTER_A_REBOOT, *arguments],
            cwd=postroom.folder,
            env=postroom.environment | environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=False,
        )

    return run


@pytest.mark.parametrize("offset", ["+8d", "+365d", "-30d"])
def test_a_wall_clock_that_is_wrong_for_one_start_expires_nothing_on_the_same_boot(
    postroom, faketime, offset
):
    postroom.ok("topic", "policy", "mail", "max_attempts=1")
    dead_id = postroom.ok("send", "mail", "broken").out.strip()
    (received,) = postroom.ok("recv", "mail", "--json").lines
    postroom.ok("nack", received["receipt"])
    ready_id = postroom.ok("send", "orders", "a chair").out.strip()

    (peeked,) = postroom.ok("peek", "orders", "--json", **faketime(offset)).lines
    (delivered,) = postroom.ok("recv", "orders", "--json", **faketime(offset)).lines

    assert peeked["message_id"] == ready_id
    assert delivered["message_id"] == ready_id
    (dead_letter,) = postroom.ok("dlq", "list", "--json").json["dead_letters"]
    assert dead_letter["message_id"] == dead_id


def test_an_uptime_clock_that_is_wrong_too_is_refused_and_changes_nothing(postroom, faketime):
    postroom.ok("send", "orders", "a chair")

    # Without this variable libfaketime answers every clock with its wall clock.
    refused = postroom(
        "recv", "orders", "--wait", "1s", **faketime("+8d") | {"FAKETIME_DONT_FAKE_MONOTONIC": "0"}
    )

    assert (refused.code, refused.out) == (1, "")
    assert "By the uptime of this machine" in refused.err
    (delivered,) = postroom.ok("recv", "orders", "--json").lines
    assert delivered["payload"] == "a chair"


@pytest.mark.parametrize("offset", ["+8d", "+365d"])
def test_a_wall_clock_far_ahead_after_a_reboot_is_refused_and_changes_nothing(
    postroom, rebooted, faketime, offset
):
    postroom.ok("send", "orders", "a chair")
    before = postroom.ok("verify", "--json").json

    refused = rebooted("recv", "orders", **faketime(offset))

    assert (refused.returncode, refused.stdout) == (1, "")
    assert "The clock of this machine says" in refused.stderr
    assert "--accept-clock" in refused.stderr
    assert postroom.ok("verify", "--json").json == before
    (delivered,) = postroom.ok("recv", "orders", "--json").lines
    assert delivered["payload"] == "a chair"


def test_a_clock_far_ahead_after_a_reboot_can_be_accepted_and_still_expires_nothing_at_once(
    postroom, rebooted, faketime
):
    message_id = postroom.ok("send", "orders", "a chair").out.strip()

    accepted = rebooted("recv", "other", "--accept-clock", **faketime("+8d"))

    assert accepted.returncode == 3, accepted
    history = postroom.ok("show", message_id, "--json").json["history"]
    assert [entry["event"] for entry in history] == ["MessageSent"]


def test_after_a_reboot_a_plausible_clock_is_believed(postroom, rebooted, faketime):
    postroom.ok("send", "orders", "a chair")

    received = rebooted("recv", "orders", **faketime("+2d"))

    assert received.returncode == 0, received
    assert "a chair" in received.stdout
