"""Fuzz every parser of bytes from outside: `python -m tests.fuzz --seconds 60 [TARGET ...]`.

Each target runs in a process of its own: guided by coverage where atheris is installed, else with random
mutations of the seeds. What is found is written to `.fuzz/TARGET-...`; move it to `tests/fuzz/corpus/TARGET/`
with the fix, and `tests/fuzz/test_targets.py` checks it from then on.
"""

import argparse
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from random import Random

from tests.fuzz.target import MAX_BYTES, TARGETS, Target, mutate

FOLDER = Path(".fuzz")
TIMEOUT_SECONDS = 10
"""Time for one input; one that takes longer is a finding."""
MEMORY_MB = 2_048


def main() -> None:
    """Fuzz the targets one after the other; the exit status is 1 if one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="time for each target")
    parser.add_argument("--one", choices=TARGETS, help=argparse.SUPPRESS)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    arguments = parser.parse_args()
    if arguments.one:
        _fuzz(arguments.one, arguments.seconds)
        return
    unknown = sorted({*arguments.targets} - {*TARGETS})
    if unknown:
        parser.error(f"unknown target {unknown[0]}; expected one of {', '.join(TARGETS)}")
    command = [sys.executable, "-m", "tests.fuzz", "--seconds", str(arguments.seconds), "--one"]
    failed = []
    for name in arguments.targets or TARGETS:
        print(f"-- {name}", flush=True)
        if subprocess.run([*command, name], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"Fuzzing found defects in: {', '.join(failed)}.")


def _fuzz(name: str, seconds: int) -> None:
    FOLDER.mkdir(exist_ok=True)
    if find_spec("atheris"):
        _fuzz_guided(name, seconds)
    else:
        _fuzz_randomly(name, seconds)


def _fuzz_guided(name: str, seconds: int) -> None:
    """Fuzz with atheris, which ends the process."""
    import atheris

    with atheris.instrument_imports(include=["postroom"]):
        target = Target(name)
    seeds, corpus = FOLDER / f"{name}.seeds", FOLDER / f"{name}.corpus"
    seeds.mkdir(exist_ok=True)
    corpus.mkdir(exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (seeds / f"{number:03}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_SECONDS}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={FOLDER}/{name}-",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    with target.opened() as check:
        atheris.Setup([sys.argv[0], *options, str(corpus), str(seeds)], check)
        atheris.Fuzz()


def _fuzz_randomly(name: str, seconds: int) -> None:
    target = Target(name)
    random, seeds = Random(), target.seeds
    end, count, data = time.monotonic() + seconds, 0, b""
    with target.opened() as check:
        try:
            while time.monotonic() < end:
                data = mutate(random, seeds)
                check(data)
                count += 1
        except Exception:
            (FOLDER / f"{name}-crash").write_bytes(data)
            print(f"{name}: failed after {count} inputs on {data!r}; it is in {FOLDER}/{name}-crash")
            raise
    print(f"{name}: {count} inputs without coverage guidance")


if __name__ == "__main__":
    main()
