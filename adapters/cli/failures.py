"""How a command fails: the exit code of each error, and what is told about it."""

from typing import Any

from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import IntegrityFailure, NotFound, PostroomError, Saturated, Unavailable

REFUSED, USAGE, NOTHING, TRY_AGAIN, INTEGRITY, DIFFERS = 1, 2, 3, 4, 5, 6
INTERRUPTED, BROKEN_PIPE = 130, 141

EXIT_CODES = """\
Exit codes: 0 done; 1 refused or failed; 2 wrong usage or settings; 3 nothing found, or nothing to receive;
4 not now, try again (saturated, unavailable, owned by another process); 5 stored data is not intact;
6 streams differ from their definitions; 130 interrupted; 141 the reader of its output left."""


def exit_code(error: PostroomError) -> int:
    """Return the exit code that tells scripts what kind of error it was."""
    match error:
        case WrongUsage():
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
    if isinstance(error, Saturated | Unavailable):
        facts["retry_after_ms"] = error.retry_after_ms
    return facts
