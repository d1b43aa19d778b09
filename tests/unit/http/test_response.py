"""What the status, the body and the headers of a handler's response mean for the message."""

import pytest

from postroom.adapters.http.event_handler import classify_response
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


@pytest.mark.parametrize("attempt", [1, 4, 5])
def test_a_status_settles_its_delivery_as_the_policies_say(attempt: int) -> None:
    """POL-047-005 to POL-047-007; the last attempt is dead-lettered (ADR 0016)."""
    for status in range(100, 600):
        settlement = settle(classify_response(status, "because"), attempt, attempt, DeliveryPolicy(5), 0.5)
        if status in (200, 201, 204, 409):
            assert settlement == Acknowledge()
        elif status == 422:
            assert settlement == RouteToDeadLetter("poison", "HTTP 422: because")
        elif attempt == 5:
            assert settlement == RouteToDeadLetter("max_deliver", f"HTTP {status}: because")
        else:
            assert isinstance(settlement, Redeliver)


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
