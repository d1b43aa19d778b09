"""The example service does what its README says."""

import os
import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, TIMEOUT_SECONDS


@pytest.mark.extended
def test_an_order_whose_shop_is_killed_before_its_event_is_published_is_shipped_once() -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTROOM_")}
    done = subprocess.run(
        [sys.executable, "-m", "docs.examples.orders.run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "The shop was killed (kill -9)." in lines
    relays = [line.split()[1:3] for line in lines if line.startswith("relay:")]
    workers = [line.split()[1:3] for line in lines if line.startswith("worker:")]
    assert relays == [["1", "published,"]]
    assert workers == [["1", "processed,"]]
    assert [line.split() for line in lines[-4:]] == [
        ["orders", "1"],
        ["events", "on", "the", "stream", "1"],
        ["inbox", "rows", "1"],
        ["shipments", "1"],
    ]
