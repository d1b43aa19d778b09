"""The drill of a store in JetStream finds nothing, and finds the defects that are put into its owners.

`make drill` does more of it.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.linearizability.defects import DEFECTS


def drill(*arguments: str) -> tuple[int, dict[str, Any]]:
    """Run the drill as a command; return its exit code and its figures."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.linearizability.drill", *arguments, "--rounds", "1", "--json"],
        env={name: value for name, value in os.environ.items() if not name.startswith("POSTROOM_")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout, done.stderr[-4_000:]
    figures: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, figures


def test_a_mailbox_in_jetstream_survives_the_kill_of_its_owner_and_of_a_server() -> None:
    code, figures = drill("--fault", "kill_runner", "--fault", "kill_follower")
    assert code == 0, figures["problems"]
    assert figures["take_overs"] == 1
    assert figures["answers"] > 0


@pytest.mark.extended
def test_a_mailbox_in_jetstream_survives_every_fault() -> None:
    code, figures = drill()
    assert code == 0, figures["problems"]
    print(figures)


FOUND_BY = {"fence-omitted": 6 * ["write_late"], "unknown-outcome-believed": ["kill_leader", "pause_quorum"]}


@pytest.mark.extended
@pytest.mark.parametrize("defect", DEFECTS)
def test_the_drill_finds_a_defect(defect: str) -> None:
    faults = [word for fault in FOUND_BY[defect] for word in ("--fault", fault)]
    code, figures = drill("--defect", defect, *faults)
    assert code == 1, figures
    assert any(figures["problems"].values())
