"""Points in time on the command line: a log position, a time, or an age."""

from datetime import UTC, datetime, timedelta
from typing import Annotated

from typer import Option

from postroom.adapters.cli.values import WrongUsage, parse_duration, parse_position

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
        help="Also read the log segments that retention archived here. [archive.folder]",
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
        time = datetime.fromisoformat(text)
    except ValueError:
        return now - _age(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def parse_micros(option: str, text: str | None) -> int | None:
    """Return the time that an option names in µs since 1970 UTC, or None without one.

    Raises: WrongUsage for a text that is neither a time nor an age.
    """
    if text is None:
        return None
    moment = parse_moment(text, datetime.now(UTC))
    if isinstance(moment, int):
        raise WrongUsage(
            f"{option} {text!r} is not a time; write 2026-01-31T08:00:00Z, or an age such as 7d."
        )
    return round(moment.timestamp() * 1_000_000)


def _age(text: str) -> timedelta:
    try:
        return timedelta(milliseconds=parse_duration(text))
    except (WrongUsage, OverflowError):
        raise WrongUsage(
            f"{text!r} is not a point in time; write a log position such as 1200, a time such as "
            "2026-01-31T08:00:00Z, or an age such as 5m."
        ) from None
