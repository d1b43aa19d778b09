"""What the status, the body and the headers of a handler's response mean for the message."""

import pytest

from postroom.adapters.http.response import classify_response
from postroom.domain.inbox import MAX_REASON, HandlerResult


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, "processed"),
        (201, "processed"),
        (204, "processed"),
        (409, "already_processed"),
        (422, "poison"),
        *[(status, "failed") for status in (100, 202, 206, 301, 302, 307, 400, 401, 403, 404, 408, 413, 429)],
        *[(status, "failed") for status in (500, 502, 503, 504, 599)],
    ],
)
def test_a_status_means(status: int, outcome: str) -> None:
    assert classify_response(status, "because").outcome == outcome


def test_the_reason_is_the_status_and_the_beginning_of_the_body() -> None:
    assert classify_response(422, "no total") == HandlerResult("poison", "HTTP 422: no total")
    assert classify_response(503) == HandlerResult("failed", "HTTP 503")
    assert len(classify_response(500, "x" * 5_000).reason or "") == MAX_REASON


@pytest.mark.parametrize(
    ("retry_after", "retry_after_ms"),
    [("5", 5_000), (" 5 ", 5_000), ("", None), ("-5", None), ("0.5", None), ("9" * 8, None), ("Fri", None)],
)
def test_only_a_number_of_seconds_says_when_to_retry(retry_after: str, retry_after_ms: int | None) -> None:
    assert classify_response(429, "", retry_after).retry_after_ms == retry_after_ms
