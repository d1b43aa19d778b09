"""Exit codes and their meanings."""

from typing import Any

from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import (
    IntegrityFailure,
    NotFound,
    PostroomError,
    Saturated,
    Unavailable,
    UnusableServer,
)

DONE, REFUSED, USAGE, NOTHING, TRY_AGAIN, INTEGRITY, DIFFERS = range(7)
INTERRUPTED, BROKEN_PIPE = 130, 141

MEANINGS = {
    DONE: "done",
    REFUSED: "refused, or failed",
    USAGE: "wrong usage, invalid settings, or a store or server that this version or user can't use",
    NOTHING: "not found, or nothing to receive",
    TRY_AGAIN: "temporary failure, retry: saturated or unavailable",
    INTEGRITY: "stored data is not intact",
    DIFFERS: "settings or streams differ from the file (`apply --check`, `streams diff`)",
    INTERRUPTED: "interrupted by Ctrl-C",
    BROKEN_PIPE: "output pipe closed by its reader",
}

HELP = "Exit codes: " + "; ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items()) + "."


def exit_code(error: PostroomError) -> int:
    """Return the exit code for a kind of error."""
    match error:
        case WrongUsage() | UnusableServer():
            return USAGE
        case NotFound():
            return NOTHING
        case Saturated() | Unavailable():
            return TRY_AGAIN
        case IntegrityFailure():
            return INTEGRITY
        case _:
            return REFUSED


def describe(error: PostroomError) -> dict[str, Any]:
    """Return an error as JSON: `{code, message, retry_after_ms?}`."""
    facts: dict[str, Any] = {"code": error.code, "message": str(error)}
    if isinstance(error, Saturated | Unavailable) and not isinstance(error, UnusableServer):
        facts["retry_after_ms"] = error.retry_after_ms
    return facts
