"""Values and options that commands share: durations, sizes, times, `NAME=VALUE` pairs, and exit codes."""

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from typer import BadParameter, Option

from postroom.adapters.cli.output import Output
from postroom.application.extras import explain_missing_extra
from postroom.application.text import UNITS_MS, duration_ms, from_rfc3339
from postroom.domain.errors import (
    IntegrityFailure,
    InvalidRequest,
    NotFound,
    PostroomError,
    Saturated,
    Unavailable,
    UnusableServer,
)

Flags = dict[str, Any]
"""The shared options by name; None or False if omitted."""


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


_UNITS_BYTES = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([kKMGT]i?B|B)\Z", re.ASCII)
_NUMBER = re.compile(r"-?\d{1,20}\Z", re.ASCII)


class WrongUsage(InvalidRequest):
    """An argument, option or setting is invalid; the message names it."""


def parse_integer(text: str) -> int | None:
    """Return an integer of ASCII digits, 20 at most, or None for anything else."""
    return int(text) if _NUMBER.match(text) else None


def parse_position(text: str) -> int | None:
    """Return an integer that is not negative, or None; see `parse_integer`."""
    return None if text.startswith("-") else parse_integer(text)


def parse_duration(text: str) -> int:
    """Return a duration such as `500ms`, `5s` or `7d` in ms; raise `WrongUsage` for anything else."""
    ms = duration_ms(text)
    if ms is None:
        raise WrongUsage(
            f"{text!r} is not a duration; write a number and a unit, such as 500ms, 5s, 2m, 1h or 7d."
        )
    if ms >= 1 << 63:
        raise WrongUsage(f"{text[:40]!r} is too large.")
    return ms


def format_duration(ms: float) -> str:
    """Return a duration, rounded, in the largest unit that fits."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1_000)):
        if ms >= size:
            return f"{ms / size:.3g}{unit}" if ms < 1_000 * size else f"{ms / size:.0f}{unit}"
    return f"{ms:.0f}ms"


def parse_size(text: str) -> int:
    """Return a size such as `10GB` (10^10 bytes) in bytes; raise `WrongUsage` for anything else."""
    match = _SIZE.match(text.strip())
    if match is None or match[2] not in _UNITS_BYTES:
        raise WrongUsage(
            f"{text!r} is not a size; write a number and a unit, such as 500kB, 64MB or 10GB (powers of "
            "1,000), or 64MiB or 10GiB (of 1,024)."
        )
    return _whole(text, float(match[1]) * _UNITS_BYTES[match[2]])


def _whole(text: str, value: float) -> int:
    if value >= 1 << 63:
        raise WrongUsage(f"{text[:40]!r} is too large.")
    return round(value)


def exact_duration(ms: int) -> str:
    """Return a duration in the largest unit that expresses it exactly."""
    unit, size = next(each for each in reversed(UNITS_MS.items()) if ms % each[1] == 0)
    return f"{ms // size}{unit}"


def exact_size(size: int) -> str:
    """Return a size in the unit that expresses it exactly in the fewest characters."""
    return min((f"{size // each}{unit}" for unit, each in _UNITS_BYTES.items() if size % each == 0), key=len)


def parse_time(text: str, now: datetime) -> int:
    """Return a point in time in ms since 1970 UTC.

    Arguments:
        text: RFC 3339 (a date alone is its midnight, a time without offset is UTC), ms since 1970, or an age
            such as `2h`, counted back from `now`.

    Raises: WrongUsage for anything else.
    """
    number = parse_integer(text)
    if number is not None:
        return number
    if duration_ms(text) is not None:
        return int(now.timestamp() * 1_000) - parse_duration(text)
    try:
        return round(from_rfc3339(text).timestamp() * 1_000)
    except ValueError:
        raise WrongUsage(
            f"{text!r} is not a time; write 2026-01-31T08:00:00Z, ms since 1970, or an age such as 2h."
        ) from None


def parse_pairs(texts: Iterable[str], option: str) -> dict[str, str]:
    """Return `NAME=VALUE` arguments as a mapping.

    Arguments:
        option: name of the option or argument, for the message.

    Raises: WrongUsage for an argument without a name, and for a repeated name.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise WrongUsage(f"{option} {text!r} is not NAME=VALUE.")
        if name in pairs:
            raise WrongUsage(f"{option} {name} is repeated; pass each name once.")
        pairs[name] = value
    return pairs


def read_words(arguments: list[str], stdin: BinaryIO) -> list[str]:
    """Return the arguments, with `-` replaced by the whitespace-separated words of standard input."""
    words: list[str] = []
    for argument in arguments:
        words += stdin.read().decode().split() if argument == "-" else [argument]
    return words


def readable(payload: bytes) -> tuple[str, bool]:
    """Return a payload as text and True, or in base64 and False if it is not UTF-8."""
    try:
        return payload.decode(), True
    except UnicodeDecodeError:
        from base64 import b64encode

        return b64encode(payload).decode(), False


END_SECONDS = 2.0
"""Time for threads of the user's code, and for functions of `atexit`, after a command has ended."""


class Process:
    """The process that the command line runs in."""

    is_own = False
    """Whether it ends with the command; else it is another program's, such as Django's."""
    has_user_code = False
    """Whether a command has imported modules of the user, whose threads may not end."""


def end_soon(code: int) -> None:
    """End the command line's own process within `END_SECONDS` if it runs user code.

    At exit, Python waits for every non-daemon thread, however long it runs.
    """
    if not (Process.is_own and Process.has_user_code):
        return

    def end() -> None:
        from postroom.application.telemetry import logger

        threads = [each.name for each in threading.enumerate() if not each.daemon]
        logger().warning("process.threads_left", threads=threads)
        with suppress(OSError, ValueError):  # nobody reads the output
            sys.stdout.flush()
        os._exit(code)

    timer = threading.Timer(END_SECONDS, end)
    timer.daemon = True
    timer.start()


At = Annotated[
    str | None,
    Option(
        "--at", metavar="POSITION|TIME", help="State at this log position, RFC 3339 time, or age such as 5m."
    ),
]

Archive = Annotated[
    str | None,
    Option(
        "--archive",
        metavar="FOLDER",
        help="Also read the log segments in this folder; '' for none. [archive.folder]",
    ),
]


def parse_moment(text: str, now: datetime) -> int | datetime:
    """Parse a log position or a time.

    Arguments:
        text: digits alone for a position; RFC 3339 (a date alone is its midnight, a time without offset is
            UTC); or an age such as `5m`, counted back from `now`.

    Raises: WrongUsage for anything else.
    """
    position = parse_position(text)
    if position is not None:
        return position
    try:
        return from_rfc3339(text)
    except ValueError:
        return _before(now, text)


def parse_due(option: str, text: str) -> datetime:
    """Parse a time that may be in the future; see `from_rfc3339`.

    Raises: WrongUsage for anything else, also for an age such as `2h`, which would be in the past.
    """
    try:
        return from_rfc3339(text)
    except ValueError:
        raise WrongUsage(f"{option} {text!r} is not a time; write 2026-12-01T08:00Z.") from None


def parse_micros(option: str, text: str | None) -> int | None:
    """Return the time that an option names in µs since 1970 UTC, or None without one.

    Raises: WrongUsage if the text is not a time or an age.
    """
    from postroom.application.queries.mailbox_past import to_us

    if text is None:
        return None
    moment = parse_moment(text, datetime.now(UTC))
    if isinstance(moment, int):
        raise WrongUsage(
            f"{option} {text!r} is not a time; write 2026-01-31T08:00:00Z, or an age such as 7d."
        )
    return to_us(moment)


def _before(now: datetime, age: str) -> datetime:
    try:
        return now - timedelta(milliseconds=parse_duration(age))
    except (WrongUsage, OverflowError):
        raise WrongUsage(
            f"{age!r} is not a point in time; write a log position such as 1200, a time such as "
            "2026-01-31T08:00:00Z, or an age such as 5m."
        ) from None


Database = Annotated[
    str | None, Option("--database", metavar="URL", help="Database of the service. [messaging.database]")
]
Nats = Annotated[str | None, Option("--nats", metavar="URL", help="NATS URL. [nats.url]")]
Outboxes = Annotated[
    list[str] | None,
    Option("--outbox", metavar="ADDRESS", help="Also count the messages that are recorded here; repeatable."),
]


Dev = Annotated[
    bool, Option("--dev", help="Let every process of this machine do everything, without tokens.")
]
MetricsPort = Annotated[
    int | None,
    Option(
        "--metrics-port",
        metavar="PORT",
        min=0,
        max=65_535,
        help="Serve /metrics, /healthz and /readyz at 127.0.0.1:PORT.",
    ),
]


Yes = Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")]


def read_payload(payload: str, file: str | None) -> bytes:
    """Return a payload: the text itself, the content of a file, or for `-` the content of stdin.

    Raises: InvalidRequest when it can't be read.
    """
    if file is not None and payload != "-":
        raise WrongUsage("PAYLOAD and --file exclude each other; omit one.")
    if file is None and payload != "-":
        return payload.encode("utf-8", "surrogateescape")
    try:
        with open(file, "rb") if file is not None else nullcontext(sys.stdin.buffer) as source:
            return source.read()
    except OSError as error:
        raise InvalidRequest(
            f"The payload can't be read from {Path(file or '-')}: {error.strerror}."
        ) from error


def _describe_os_error(error: OSError | UnicodeEncodeError) -> str:
    """Return one sentence with the file and the reason."""
    if isinstance(error, UnicodeEncodeError):
        return f"The argument {error.object!r} is not valid UTF-8."
    if error.filename is None:
        return f"The operating system reports: {error}."
    return f"{error.filename}: {error.strerror}."


def report_errors(flags: Flags, run: Callable[[], int]) -> int:
    """Run a command and return its exit code; write an error as one line instead of a traceback."""
    out = Output(flags["as_json"])
    try:
        with explain_missing_extra():
            return run()
    except PostroomError as error:
        if flags["debug"]:
            traceback.print_exc()
        out.error(describe(error))
        return exit_code(error)
    except KeyboardInterrupt:
        out.error({"code": "E_INTERRUPTED", "message": "Interrupted."})
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout is gone; otherwise Python reports a second BrokenPipeError at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except BadParameter:
        raise
    except (OSError, UnicodeEncodeError) as error:
        if flags["debug"]:
            traceback.print_exc()
        out.error({"code": "E_IO", "message": _describe_os_error(error)})
        return REFUSED
    except Exception as error:
        from postroom.application.telemetry import summarize

        if flags["debug"]:
            traceback.print_exc()
        hint = "" if flags["debug"] else " Run it again with --debug and report the traceback."
        out.error({"code": "E_DEFECT", "message": f"This is a defect of Postroom: {summarize(error)}.{hint}"})
        return REFUSED
