"""`postroom bench`: run the benchmarks of a source checkout."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from typer import Argument

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

CHECKOUT = Path(__file__).resolve().parents[2]


def bench(
    session: Session,
    arguments: Annotated[
        list[str] | None,
        Argument(metavar="[ARGUMENTS]...", help="Arguments of the benchmarks; see postroom bench -- --help."),
    ] = None,
) -> int:
    """Run the benchmarks in tests/benchmarks of a source checkout; packages do not contain them."""
    if not (CHECKOUT / "tests" / "benchmarks").is_dir():
        raise WrongUsage(
            "The benchmarks are not part of the installed package; clone the source repository and run "
            "make bench there."
        )
    options = ["--json"] if session.out.as_json else []
    command = [sys.executable, "-m", "tests.benchmarks", *options, *(arguments or [])]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(CHECKOUT)}, check=False).returncode
