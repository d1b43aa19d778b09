"""Checks of an installation: each finds facts, changes nothing, and has a deadline."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from typing import Literal, NamedTuple

import msgspec

from postroom.application.telemetry import summarize
from postroom.application.threads import DaemonExecutor
from postroom.domain.errors import PostroomError

MAX_SKEW_MS = 1_000
"""Difference between the clocks of two machines from which on they are reported."""

Status = Literal["ok", "warning", "failure"]


class Finding(msgspec.Struct, frozen=True):
    """Result of a check.

    Arguments:
        finding: the finding.
        advice: what to do; empty if nothing.
    """

    check: str
    status: Status
    finding: str
    advice: str = ""


class Check(NamedTuple):
    """A check; `run` may block, and yields one finding or several of its own names."""

    name: str
    run: Callable[[], Iterable[Finding]]


def run_checks(checks: Sequence[Check], seconds: float) -> list[Finding]:
    """Run checks at once and return their findings in order.

    A check that raises an error has failed, as has one without an answer in time: it is abandoned in a thread
    that does not keep the process from ending.

    Arguments:
        seconds: deadline of all checks.
    """
    executor = DaemonExecutor(len(checks), "check")
    running = [executor.submit(lambda check=check: list(check.run())) for check in checks]  # type: ignore[misc]
    wait(running, timeout=seconds)
    findings: list[Finding] = []
    for check, future in zip(checks, running, strict=True):
        if not future.done():
            advice = "See whether it hangs or is overloaded, or wait longer with --within."
            findings.append(Finding(check.name, "failure", f"no answer within {seconds:g} s", advice))
        elif (error := future.exception()) is None:
            findings += future.result()
        elif isinstance(error, PostroomError):
            findings.append(Finding(check.name, "failure", str(error)))
        else:
            findings.append(Finding(check.name, "failure", f"the check failed: {summarize(error)}"))
    executor.shutdown(wait=False)
    return findings


def shown_bytes(count: float) -> str:
    """Return a number of bytes in a unit that suits its size."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1_000:
            return f"{count:.3g} {unit}"
        count /= 1_000
    return f"{count:,.3g} TB"


def clock_finding(name: str, before: int, theirs: int, after: int) -> Finding:
    """Return how far another machine's clock is from ours.

    Arguments:
        before, after: our time when it was asked and when it had answered, µs since 1970.
        theirs: its time.
    """
    skew_ms = max(before - theirs, theirs - after, 0) // 1_000
    if skew_ms <= MAX_SKEW_MS:
        return Finding(name, "ok", "agrees with ours")
    direction = "behind" if theirs < before else "ahead of"
    return Finding(name, "warning", f"{skew_ms:,} ms {direction} ours", "Synchronize both clocks (NTP).")
