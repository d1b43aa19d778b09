import json
import subprocess
import sys
from pathlib import Path

from tests.architecture.walk import LIMITS


def test_operations_pass_no_more_places_than_their_limits() -> None:
    """Measured in a process of its own, where nothing else runs that would be counted."""
    command = [sys.executable, "-m", "tests.architecture", "walk", "--json"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    measured = {name: tuple(walk.values()) for name, walk in json.loads(done.stdout).items()}
    assert measured.keys() == LIMITS.keys()
    excess = {
        name: walk
        for name, walk in measured.items()
        if any(count > limit for count, limit in zip(walk, LIMITS[name], strict=True))
    }
    assert excess == {}
