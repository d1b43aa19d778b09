"""Run time and peak memory of programs."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from threading import Event, Thread
from typing import NamedTuple

from tests.benchmarks.figures import Stopwatch

SAMPLE_SECONDS = 0.2
"""Shorter-lived processes may be missed; the system records the peak of all others."""


class Finished(NamedTuple):
    """What a program did.

    Arguments:
        seconds: from its start to its end.
        output: what it printed.
        peak_mib: the peak of its memory: of the `driver`, which is what is no worker of Spark's, and of the
            `workers`, each the sum over its processes of the most that each held at any time (VmHWM).
    """

    seconds: float
    output: str
    peak_mib: dict[str, float]


def run_program(command: Sequence[str], environment: Mapping[str, str]) -> Finished:
    """Run a program to its end.

    Arguments:
        environment: what is added to that of this process.

    Raises: RuntimeError with what it wrote to its standard error, when it failed.
    """
    with TemporaryFile() as output, TemporaryFile() as errors:
        with Stopwatch() as running:
            program = subprocess.Popen(
                command, stdout=output, stderr=errors, env={**os.environ, **environment}
            )
            peaks_of = _Peaks(program.pid)
            code = program.wait()
        peaks = peaks_of.stop()
        if code != 0:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed: {errors.read().decode(errors='replace')}")
        output.seek(0)
        return Finished(running.seconds, output.read().decode(), peaks)


class _Peaks:
    """Look at the memory of a process and its descendants as long as they live."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peaks: dict[int, float] = {}
        self._roles: dict[int, str] = {}
        self._is_over = Event()
        self._thread = Thread(target=self._look)
        self._thread.start()

    def stop(self) -> dict[str, float]:
        """Return the sums by role, in MiB."""
        self._is_over.set()
        self._thread.join()
        sums = {"driver": 0.0, "workers": 0.0}
        for pid, peak in self._peaks.items():
            sums[self._roles[pid]] += peak
        return sums

    def _look(self) -> None:
        while not self._is_over.is_set():
            for pid in _family(self._pid):
                with suppress(OSError, IndexError):  # it has just ended
                    peak = _peak_mib(pid)
                    # A program's name changes when it becomes another, as spark-submit does.
                    self._roles[pid] = _role(pid)
                    self._peaks[pid] = peak
            self._is_over.wait(SAMPLE_SECONDS)


def _family(ancestor: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError):
                # The name in front may hold blanks and brackets.
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    family = {ancestor}
    while True:
        more = {pid for pid, parent in parents.items() if parent in family} - family
        if not more:
            break
        family |= more
    yield from family


def _peak_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1_024


def _role(pid: int) -> str:
    return "workers" if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes() else "driver"
