"""The demonstration of a cluster does what its README says."""

import os
import re
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, TIMEOUT_SECONDS


@pytest.mark.extended
def test_a_mailbox_goes_on_at_another_runner_when_its_runner_is_killed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "docs.examples.cluster.run", "--standalone", "--messages", "90"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line[9:] for line in done.stdout.splitlines()]
    (killed,) = [line.partition(" ")[0] for line in lines if "was killed" in line]
    (moved,) = [line for line in lines if line.startswith("The lease moved")]
    assert killed not in moved
    assert re.search(r"epoch [2-9]", moved)
    assert any(line.startswith("The route changed: shop@a") for line in lines)
    assert "90 messages sent, 90 acked, 0 lost, 0 left." in lines
