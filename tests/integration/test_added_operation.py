"""An operation that is written in one place is offered by every surface."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_an_added_operation_is_called_over_every_surface(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.added_operation", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    answers = json.loads(done.stdout)
    described = answers.pop("openapi")
    assert described["summary"] == "Count the topics with at least `least` ready messages."
    (least,) = (each for each in described["parameters"] if each["name"] == "least")
    assert (least["required"], least["schema"]["minimum"]) == (False, 0)
    assert answers == {
        "owner": 1,
        "local socket": 1,
        "bounds": "least must be at least 0; it was -1.",
        "threads": 1,
        "http": 1,
        "grpc": "The contract postroom.v1 has no method count_topics; call it over HTTP.",
        "namespace": 3,
        "capability": 3,
        "limited capability": "E_CAP_SCOPE",
    }
