"""What the status, the body and the headers of a handler's response mean for the message."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.http.response import classify_response
from postroom.domain.inbox import (
    MAX_REASON,
    Acknowledge,
    DeliveryPolicy,
    HandlerResult,
    Redeliver,
    RouteToDeadLetter,
    settle,
)


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


@given(
    status=st.integers(100, 599) | st.sampled_from([200, 409, 422]),
    attempt=st.integers(1, 5),
    jitter=st.floats(0, 1, exclude_max=True),
)
def test_a_status_settles_its_delivery_as_the_policies_say(status: int, attempt: int, jitter: float) -> None:
    """POL-047-005 to POL-047-007; the last attempt is dead-lettered, as the stream would drop it (ADR 0016)."""
    settlement = settle(classify_response(status, "because"), attempt, attempt, DeliveryPolicy(5), jitter)
    match settlement:
        case Acknowledge():
            assert status in (200, 201, 204, 409)
        case RouteToDeadLetter():
            assert status not in (200, 201, 204, 409)
            assert (settlement.reason == "poison", settlement.reason == "max_deliver") == (
                status == 422,
                status != 422,
            )
            assert status == 422 or attempt == 5
        case Redeliver():
            assert status not in (200, 201, 204, 409, 422)
            assert attempt < 5


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
