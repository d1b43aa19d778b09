"""What the response of a handler says about a message (SDS-047 section 12)."""

from postroom.domain.inbox import MAX_REASON, PROCESSED, HandlerResult

SUCCESS = frozenset({200, 201, 204})
ALREADY_PROCESSED = 409
POISON = 422


def classify_response(status: int, body: str = "", retry_after: str = "") -> HandlerResult:
    """Return the result that an HTTP response means.

    200, 201 and 204 mean processed, 409 already processed, 422 poison. Everything else is a failure and is
    retried: a redirect, 404 or 401 indicates a wrong address or key rather than a bad message, and 202
    doesn't confirm processing.

    Arguments:
        body: the beginning of the response's body.
        retry_after: the header; only a number of seconds counts.
    """
    reason = f"HTTP {status}: {body}"[:MAX_REASON] if body else f"HTTP {status}"
    if status in SUCCESS:
        return PROCESSED
    if status == ALREADY_PROCESSED:
        return HandlerResult("already_processed")
    if status == POISON:
        return HandlerResult("poison", reason)
    return HandlerResult("failed", reason, _milliseconds(retry_after))


def _milliseconds(retry_after: str) -> int | None:
    seconds = retry_after.strip()
    return int(seconds) * 1_000 if seconds.isascii() and seconds.isdecimal() and len(seconds) < 8 else None
