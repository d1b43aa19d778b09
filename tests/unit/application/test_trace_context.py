"""W3C trace context: what is read from headers, and written to them."""

import pytest

from postroom.application.tracing import TraceContext, make_context, read_context

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_what_is_written_is_read_again() -> None:
    context = TraceContext(TRACE, SPAN, 1, "vendor=a:1,other=b", {"user": "Zoë, 1=2", "tier": "gold"})
    headers = context.headers()
    assert headers["traceparent"] == f"00-{TRACE}-{SPAN}-01"
    assert all(value.isascii() for value in headers.values())
    assert read_context(headers["traceparent"], headers["tracestate"], headers["baggage"]) == context


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-0g",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)
def test_a_malformed_traceparent_is_no_context(traceparent: str) -> None:
    assert read_context(traceparent, "vendor=a", "user=1") is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert read_context(f"cc-{TRACE}-{SPAN}-01-what") == TraceContext(TRACE, SPAN, 1)


@pytest.mark.parametrize(
    "baggage", ["no-pair", "a b=1", ",".join(f"k{n}=1" for n in range(65)), "k=" + "x" * 9_000]
)
def test_baggage_that_is_malformed_or_too_large_is_left_out(baggage: str) -> None:
    assert read_context(f"00-{TRACE}-{SPAN}-01", "x" * 600, baggage) == TraceContext(TRACE, SPAN, 1)


def test_properties_of_baggage_are_left_out() -> None:
    context = read_context(f"00-{TRACE}-{SPAN}-00", None, "user=1;secure, tier=gold")
    assert context == TraceContext(TRACE, SPAN, 0, "", {"user": "1", "tier": "gold"})


def test_ids_that_are_no_trace_context_make_none() -> None:
    assert make_context("order-1", SPAN) is None
    assert make_context(TRACE, None) is None
    assert make_context(TRACE, SPAN) == TraceContext(TRACE, SPAN, 1)
