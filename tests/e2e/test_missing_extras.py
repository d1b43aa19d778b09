"""What commands say where the extra that they need is not installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import TIMEOUT_SECONDS

WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
sys.argv = ["postroom", *sys.argv[2:]]
from postroom.adapters.cli.main import main
sys.exit(main())
"""


def without(package: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as if a package were not installed."""
    command = [sys.executable, "-c", WITHOUT, package, "--store", str(folder / "store.db"), *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=folder, timeout=TIMEOUT_SECONDS
    )


@pytest.mark.parametrize("package", ["polars", "pyspark"])
@pytest.mark.parametrize("command", ["rebuild", "verify"])
def test_a_rebuild_and_a_verification_name_the_extra(tmp_path: Path, package: str, command: str) -> None:
    assert without("redis", tmp_path, "send", "orders", "hello").returncode == 0
    refused = without(package, tmp_path, "views", command)
    assert refused.returncode != 0
    if (package, command) != ("pyspark", "verify"):  # which first misses the read models
        assert "pip install 'postroom[spark]'" in refused.stderr


def test_the_demo_shows_the_queue_and_names_the_extra(tmp_path: Path) -> None:
    shown = without("polars", tmp_path, "demo")
    assert shown.returncode == 0, shown.stderr
    assert "pip install 'postroom[spark]'" in shown.stdout + shown.stderr
    assert "Backlog" in shown.stdout


def test_up_ends_with_the_extra_that_a_part_needs(tmp_path: Path) -> None:
    ended = without("polars", tmp_path, "up", "--views", "--http", "127.0.0.1:0")
    assert ended.returncode != 0
    assert "pip install 'postroom[views]'" in ended.stderr
    assert "Traceback" not in ended.stderr
