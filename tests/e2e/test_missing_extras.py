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


@pytest.mark.parametrize("command", ["rebuild", "verify"])
def test_a_rebuild_and_a_verification_name_the_extra(tmp_path: Path, command: str) -> None:
    assert without("redis", tmp_path, "send", "orders", "hello").returncode == 0
    refused = without("polars", tmp_path, "views", command)
    assert refused.returncode != 0
    assert "pip install 'postroom[views]'" in refused.stderr


def test_without_spark_a_rebuild_runs_here_and_one_on_spark_names_the_extra_and_the_other_engine(
    tmp_path: Path,
) -> None:
    assert without("redis", tmp_path, "send", "orders", "hello").returncode == 0
    assert without("pyspark", tmp_path, "views", "rebuild").returncode == 0
    refused = without("pyspark", tmp_path, "views", "rebuild", "--engine", "spark")
    assert refused.returncode != 0
    assert "pip install 'postroom[spark]', or do without Spark: --engine local." in refused.stderr


def test_the_demo_shows_the_queue_and_names_the_extra(tmp_path: Path) -> None:
    shown = without("polars", tmp_path, "demo")
    assert shown.returncode == 0, shown.stderr
    assert "pip install 'postroom[views]'" in shown.stdout + shown.stderr
    assert "Backlog" in shown.stdout


def test_up_ends_with_the_extra_that_a_part_needs(tmp_path: Path) -> None:
    ended = without("polars", tmp_path, "up", "--views", "--http", "127.0.0.1:0")
    assert ended.returncode != 0
    assert "pip install 'postroom[views]'" in ended.stderr
    assert "Traceback" not in ended.stderr
