"""Test modules that run in a process of their own, such as those on chdb.

ClickHouse keeps the threads of each folder it opened, and some files a thread, until its process ends: beside
them other libraries, which wait for files by `select`, stop working.
"""

import os
import sys
from pathlib import Path
from subprocess import run

OWN_PROCESS = "POSTROOM_TEST_OWN_PROCESS"
IS_OWN_PROCESS = OWN_PROCESS in os.environ


def run_own_process(module: str) -> None:
    """Run the tests of a module in a process that shares nothing with this one; they must pass.

    Arguments:
        module: path of the module, whose tests are defined if `IS_OWN_PROCESS`.
    """
    pytest_ = Path(sys.executable).with_name("pytest")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    if environment.get("HYPOTHESIS_PROFILE", "gate") == "gate":
        environment["HYPOTHESIS_PROFILE"] = "brief"
    done = run(
        [pytest_, "-q", module],
        env=environment | {OWN_PROCESS: "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
