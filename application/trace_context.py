"""W3C trace context: what links the spans of a trace across calls and messages (`traceparent`, `baggage`)."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from postroom.domain.outbox import MAX_BAGGAGE_CHARS, MAX_STATE_CHARS

SAMPLED: Final = 1
"""Trace flag: the caller records the trace."""
MAX_BAGGAGE_ENTRIES: Final = 64
_NONE: Final[Mapping[str, str]] = MappingProxyType({})
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", re.ASCII)
_TRACE_ID, _SPAN_ID = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16}")


class TraceContext(msgspec.Struct, frozen=True):
    """Position in a trace, valid as W3C defines it.

    Arguments:
        trace_id, span_id: lower-case hexadecimal, 32 and 16 digits.
        trace_flags: 1 if the caller records the trace.
        trace_state: what tracing systems add for themselves (`tracestate`).
        baggage: application's entries by name.
    """

    trace_id: str
    span_id: str
    trace_flags: int = SAMPLED
    trace_state: str = ""
    baggage: Mapping[str, str] = _NONE

    @property
    def traceparent(self) -> str:
        """Return it as the header of that name, without state and baggage."""
        return f"00-{self.trace_id}-{self.span_id}-{self.trace_flags & 0xFF:02x}"

    def headers(self) -> dict[str, str]:
        """Return it as the headers `traceparent`, `tracestate` and `baggage`."""
        headers = {"traceparent": self.traceparent}
        if self.trace_state:
            headers["tracestate"] = self.trace_state
        if self.baggage:
            headers["baggage"] = ",".join(f"{name}={quote(value)}" for name, value in self.baggage.items())
        return headers


def make_context(
    trace_id: str | None,
    span_id: str | None,
    trace_flags: int = SAMPLED,
    trace_state: str = "",
    baggage: Mapping[str, str] = _NONE,
) -> TraceContext | None:
    """Return a context; None unless both ids are valid."""
    if not trace_id or not span_id or not _TRACE_ID.fullmatch(trace_id) or not _SPAN_ID.fullmatch(span_id):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return TraceContext(trace_id, span_id, trace_flags & 0xFF, trace_state, baggage)


def read_context(
    traceparent: str | None, tracestate: str | None = None, baggage: str | None = None
) -> TraceContext | None:
    """Return the context of a caller's headers; None without a valid `traceparent`.

    A state or baggage that is malformed or too large is left out.
    """
    match = _TRACEPARENT.fullmatch(traceparent.strip()) if traceparent else None
    if match is None or (match[0].startswith("00") and match[4]):
        return None
    state = tracestate.strip() if tracestate else ""
    is_valid = len(state) <= MAX_STATE_CHARS and state.isascii() and state.isprintable()
    return make_context(
        match[1], match[2], int(match[3], 16), state if is_valid else "", _read_baggage(baggage or "")
    )


def context_of(headers: Mapping[str, str]) -> TraceContext | None:
    """Return the context of a message's headers, or of a call's whose names are in lower case."""
    if (traceparent := headers.get("traceparent")) is None:
        return None
    return read_context(traceparent, headers.get("tracestate"), headers.get("baggage"))


def _read_baggage(text: str) -> Mapping[str, str]:
    if not text or len(text) > MAX_BAGGAGE_CHARS:
        return _NONE
    entries: dict[str, str] = {}
    for member in text.split(","):
        name, is_pair, value = member.partition(";")[0].partition("=")
        if not is_pair or not _NAME.fullmatch(name.strip()):
            return _NONE
        entries[name.strip()] = unquote(value.strip())
    return entries if len(entries) <= MAX_BAGGAGE_ENTRIES else _NONE
