"""AWS Signature Version 4: the access key and the signature of a request."""

import hashlib
import hmac
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, quote

from postroom.adapters.sqs.errors import SqsError

ALGORITHM: Final = "AWS4-HMAC-SHA256"
MAX_SKEW_SECONDS: Final = 900
MAX_CHARS: Final = 6_000
_AUTHORIZATION = re.compile(
    ALGORITHM + r" +Credential=([^/,\s]+)/(\d{8})/([^/,\s]+)/sqs/aws4_request, *"
    r"SignedHeaders=([a-z0-9;-]+), *Signature=([0-9a-f]{64})"
)
_SAFE = "-_.~"


class Request(NamedTuple):
    """A request as it was signed.

    Arguments:
        path, query: as they were sent.
        headers: names in lower case.
    """

    method: str
    path: str
    query: str
    headers: Sequence[tuple[str, str]]
    body: bytes

    def values(self, name: str) -> list[str]:
        """Return the values of a header."""
        return [value for each, value in self.headers if each == name]


class Signature(NamedTuple):
    """Signature of a request, which is not verified yet.

    Arguments:
        key: id of the access key.
        time: `X-Amz-Date`.
        scope: date, region and service.
    """

    key: str
    time: str
    scope: tuple[str, ...]
    signed: tuple[str, ...]
    value: str


def read_signature(request: Request, now: float) -> Signature:
    """Return the signature of a request.

    Arguments:
        now: seconds since 1970 UTC.

    Raises: SqsError without a signature, or for one that is malformed or of another time.
    """
    values = request.values("authorization")
    if not values:
        raise SqsError("MissingAuthenticationToken", "The request must be signed with an access key.", 403)
    match = _AUTHORIZATION.fullmatch(values[0]) if len(values) == 1 and len(values[0]) <= MAX_CHARS else None
    times = request.values("x-amz-date")
    if match is None or len(times) != 1:
        raise SqsError("IncompleteSignature", "The request needs X-Amz-Date and a signature of version 4.")
    key, date, region, signed, value = match.groups()
    try:
        at = datetime.strptime(times[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise SqsError("IncompleteSignature", "X-Amz-Date has the form 20260131T120000Z.") from None
    if not times[0].startswith(date) or "host" not in signed.split(";"):
        raise SqsError("IncompleteSignature", "The signature must be of its date, and of the header Host.")
    if request.values("x-amz-target") and "x-amz-target" not in signed.split(";"):
        raise SqsError("IncompleteSignature", "The signature must be of the header X-Amz-Target, too.")
    if abs(now - at) > MAX_SKEW_SECONDS:
        raise SqsError("RequestExpired", "The request was signed more than 15 minutes ago or ahead.")
    return Signature(key, times[0], (date, region, "sqs", "aws4_request"), tuple(signed.split(";")), value)


def verify_signature(request: Request, signature: Signature, secret: str) -> None:
    """Raise SqsError unless a request was signed with a secret access key."""
    canonical = "\n".join(
        (
            request.method,
            quote(request.path, safe="/~"),
            _canonical_query(request.query),
            *(f"{name}:{_joined(request.values(name))}" for name in signature.signed),
            "",
            ";".join(signature.signed),
            hashlib.sha256(request.body).hexdigest(),
        )
    )
    text = "\n".join(
        (
            ALGORITHM,
            signature.time,
            "/".join(signature.scope),
            hashlib.sha256(canonical.encode()).hexdigest(),
        )
    )
    key = f"AWS4{secret}".encode()
    for part in signature.scope:
        key = hmac.digest(key, part.encode(), "sha256")
    expected = hmac.new(key, text.encode(), "sha256").hexdigest()
    if not hmac.compare_digest(expected, signature.value):
        raise SqsError(
            "SignatureDoesNotMatch",
            "The signature does not match the request; check the secret access key.",
            403,
        )


def _canonical_query(query: str) -> str:
    pairs = sorted(
        (quote(name, safe=_SAFE), quote(value, safe=_SAFE))
        for name, value in parse_qsl(query, keep_blank_values=True)
    )
    return "&".join(f"{name}={value}" for name, value in pairs)


def _joined(values: Sequence[str]) -> str:
    return ",".join(" ".join(value.split()) for value in values)
