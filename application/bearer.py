"""Bearer tokens of requests (RFC 6750)."""

import re
from collections.abc import Sequence

from postroom.domain.errors import Unauthenticated

MAX_CREDENTIALS_CHARS = 5_000
_CREDENTIALS = re.compile(r"(?i:bearer) +([A-Za-z0-9._~+/-]+=*)")


def read_bearer(values: Sequence[str]) -> str | None:
    """Return the token of a request; None if it has no credentials.

    Arguments:
        values: of its `Authorization` headers.

    Raises: Unauthenticated for several headers, and for one that is no bearer token; it is never shown.
    """
    if not values:
        return None
    if len(values) > 1:
        raise Unauthenticated("The request has several Authorization headers; send one.")
    match = _CREDENTIALS.fullmatch(values[0]) if len(values[0]) <= MAX_CREDENTIALS_CHARS else None
    if match is None:
        raise Unauthenticated("The Authorization header must be `Bearer` and a token.")
    return match[1]
