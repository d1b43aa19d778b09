import sys

import pytest

from tests.benchmarks.processes import run_program

HOLD = "data = bytearray(100 << 20); import time; time.sleep(0.6)"


def test_a_program_is_measured_with_all_the_processes_it_starts() -> None:
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HOLD!r}], check=True)"
    finished = run_program([sys.executable, "-c", nested], {})
    assert finished.peak_mib["driver"] > 100
    assert finished.peak_mib["workers"] == 0
    assert finished.seconds > 0.6


def test_what_only_workers_of_spark_hold_is_counted_as_theirs() -> None:
    nested = (
        "import subprocess, sys; "
        f"subprocess.run([sys.executable, '-c', {HOLD!r}, 'pyspark.daemon'], check=True)"
    )
    finished = run_program([sys.executable, "-c", nested], {})
    assert finished.peak_mib["workers"] > 100 > finished.peak_mib["driver"]


def test_a_program_sees_what_is_added_to_its_environment_and_its_output_comes_back() -> None:
    finished = run_program([sys.executable, "-c", "import os; print(os.environ['ADDED'])"], {"ADDED": "here"})
    assert finished.output == "here\n"


def test_a_program_that_fails_is_told_of_in_its_own_words() -> None:
    with pytest.raises(RuntimeError, match="no such store"):
        run_program([sys.executable, "-c", "raise SystemExit('no such store')"], {})
