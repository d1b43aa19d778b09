"""A cancellation that coincides with the result of a connection attempt ends the reconnect."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.nats import NatsServer

SOON_SECONDS = 60
"""Far more than closing or cancelling takes; without `_end_if_cancelled` the processes run for ever."""


@pytest.mark.parametrize("last_step", ["close", "cancel"])
def test_a_client_ends_at_whatever_point_of_a_reconnect_it_is_closed_or_cancelled(
    tmp_path: Path, last_step: str
) -> None:
    with NatsServer(tmp_path / "nats") as server:
        command = [sys.executable, "-m", "tests.integration.nats_reconnecting", server.url, last_step]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "connected\n"
                server.kill()
                _, errors = process.communicate(timeout=SOON_SECONDS)
            finally:
                process.send_signal(signal.SIGKILL)
        assert (process.returncode, errors) == (0, "")
