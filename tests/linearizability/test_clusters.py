"""Leases and messages of a cluster of processes are linearizable while these are killed, paused and cut off.

`make linearizability ROUNDS=n` does more of it.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.linearizability.__main__ import has_network_tools, in_own_network
from tests.linearizability.cluster import MAILBOXES, run

RUN = """
import sys
from pathlib import Path
from tests.linearizability.cluster import run
store, folder, *faults = sys.argv[1:]
print(run(store, Path(folder), faults=faults, is_cut_off=True, size=2))
"""


@pytest.mark.parametrize(
    ("store", "faults"),
    [
        ("memory", ["pause_runner"]),
        ("postgres", ["kill_runner"]),
        pytest.param("jetstream", ["kill_runner", "kill_leader"], marks=pytest.mark.extended),
    ],
)
def test_a_cluster_keeps_its_promises_through_faults(tmp_path: Path, store: str, faults: list[str]) -> None:
    figures = run(store, tmp_path, faults=faults, size=2)
    assert figures.epochs > len(MAILBOXES)
    print(figures)


@pytest.mark.skipif(not has_network_tools(), reason="needs root, unshare, ip and nft to drop packets")
def test_a_cluster_keeps_its_promises_while_runners_and_admins_are_cut_off(tmp_path: Path) -> None:
    faults = ["cut_off_runner", "cut_off_admin"]
    command = in_own_network([sys.executable, "-c", RUN, "sqlite", str(tmp_path), *faults])
    output = subprocess.run(command, capture_output=True, text=True, check=False)
    assert output.returncode == 0, output.stderr[-4_000:]
    assert "are linearizable" in output.stdout
