"""Times in form fields."""

import re
from datetime import UTC, datetime, timedelta

from postroom.domain.errors import InvalidRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_AGE = re.compile(r"(\d{1,9})(s|m|h|d)\Z", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


def read_time(name: str, text: str, now: datetime) -> int:
    """Return a point in time in µs since 1970 UTC.

    Arguments:
        name: name of the field, for the error.
        text: RFC 3339 (a date alone is its midnight, a time without offset is UTC), or an age such as `2h`.

    Raises: InvalidRequest for anything else.
    """
    try:
        age = _AGE.match(text.strip())
        if age is not None:
            time = now - timedelta(**{_UNITS[age[2]]: int(age[1])})
        else:
            time = datetime.fromisoformat(text.strip())
        return ((time if time.tzinfo else time.replace(tzinfo=UTC)) - _EPOCH) // timedelta(microseconds=1)
    except (ValueError, OverflowError):
        raise InvalidRequest(
            f"{name} is {text[:40]!r}, which is not a time; write 2026-01-31T08:00:00Z, or an age such as 2h."
        ) from None
