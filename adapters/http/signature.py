"""Signatures of requests: how the worker proves to a handler that a request is its own.

A request carries `Postroom-Timestamp: 1766959200` (Unix seconds) and `Postroom-Signature: v1=<hex>`, the
HMAC-SHA256 of the timestamp, a dot and the body as sent. With two keys, while one replaces the other, it
carries a signature by each: `v1=<hex>,v1=<hex>`; a handler that knows either accepts it.
"""

import hmac
import time
from collections.abc import Iterable, Mapping

from postroom.domain.errors import InvalidRequest, Unauthenticated

TIMESTAMP_HEADER = "Postroom-Timestamp"
SIGNATURE_HEADER = "Postroom-Signature"
TOLERANCE_SECONDS = 300
MIN_KEY_BYTES = 16
_SCHEME = "v1="
_MAX_SIGNATURES = 8


def check_keys(keys: Iterable[str | bytes]) -> tuple[bytes, ...]:
    """Return signing keys as bytes.

    Raises: InvalidRequest when there is none or one is too short to be a secret; no message shows a key.
    """
    checked = tuple(key.encode() if isinstance(key, str) else key for key in keys)
    if not checked:
        raise InvalidRequest(
            "Requests to handlers are signed and there is no key; set [inbox] signing_key_file, or "
            "POSTROOM_INBOX__SIGNING_KEY, to what `openssl rand -hex 32` prints."
        )
    if any(len(key) < MIN_KEY_BYTES for key in checked):
        raise InvalidRequest(
            f"A signing key must have at least {MIN_KEY_BYTES} bytes; make one with `openssl rand -hex 32`."
        )
    return checked


def sign(body: bytes, timestamp: int, keys: Iterable[bytes]) -> dict[str, str]:
    """Return the headers that sign a body.

    Arguments:
        timestamp: Unix seconds, UTC.
        keys: the current one first; each gives a signature.
    """
    signatures = (_SCHEME + _digest(body, str(timestamp), key).hex() for key in keys)
    return {TIMESTAMP_HEADER: str(timestamp), SIGNATURE_HEADER: ",".join(signatures)}


def verify_signature(
    headers: Mapping[str, str],
    body: bytes,
    keys: str | bytes | Iterable[str | bytes],
    *,
    now: float | None = None,
    tolerance_seconds: int = TOLERANCE_SECONDS,
) -> None:
    """See that a request was signed with one of the keys, not long ago; call it before reading the body.

    Arguments:
        headers: of the request, as FastAPI, Starlette and aiohttp give them.
        body: the body's bytes exactly as received, such as `await request.body()`.
        keys: the key, or two of them while one replaces the other.
        now: Unix seconds; None asks the clock.
        tolerance_seconds: how far the timestamp may be from now.

    Raises: Unauthenticated, to be answered with 401.
    """
    accepted = check_keys((keys,) if isinstance(keys, str | bytes) else keys)
    by_name = {name.lower(): value for name, value in headers.items()}
    stamp, given = by_name.get(TIMESTAMP_HEADER.lower(), ""), by_name.get(SIGNATURE_HEADER.lower(), "")
    if not (stamp.isascii() and stamp.isdecimal() and len(stamp) <= 12):
        raise Unauthenticated(f"The request has no {TIMESTAMP_HEADER} of Unix seconds; send it signed.")
    if abs((time.time() if now is None else now) - int(stamp)) > tolerance_seconds:
        raise Unauthenticated(
            f"The request was signed more than {tolerance_seconds} s ago, or the clocks differ by as much; "
            "set them right and send it again."
        )
    signatures = [
        part.strip().removeprefix(_SCHEME).encode()
        for part in given.split(",")[:_MAX_SIGNATURES]
        if part.strip().startswith(_SCHEME)
    ]
    expected = [_digest(body, stamp, key).hex().encode() for key in accepted]
    if not any(hmac.compare_digest(one, other) for one in signatures for other in expected):
        raise Unauthenticated(f"The {SIGNATURE_HEADER} of the request is of none of the keys; check them.")


def _digest(body: bytes, timestamp: str, key: bytes) -> bytes:
    return hmac.digest(key, timestamp.encode() + b"." + body, "sha256")
