"""The SQL text of each report, run by DuckDB on generated events, beside plain Python."""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageSent,
)
from postroom.domain.record import Event
from postroom.projections.reports.local import run_report
from postroom.projections.reports.report import REPORTS
from postroom.projections.spark.columns import EVENTS, arrow_schema
from tests.conformance.records import sent, stream
from tests.projections.report_logs import BEGAN, BOXES, ERRORS, HOUR, figures

TOPICS = ("a", "b\x00", "ü")
BOUND = 1_000_000
SCHEMA = arrow_schema(column for column in EVENTS if column.kind in ("text", "number", "time"))
Logs = dict[str, list[Event]]

gaps = st.sampled_from([0, 1, BOUND - 1, BOUND, BOUND + 1, HOUR - 1, HOUR])
outcomes = st.sampled_from(["ack", "nack", "nack", "reject", "redrive", "expire", "none"])
deliveries = st.lists(st.tuples(gaps, gaps, outcomes, st.sampled_from(ERRORS)), max_size=4)
messages = st.tuples(
    gaps, st.sampled_from(TOPICS), st.booleans(), st.integers(0, 9), st.sampled_from([None, "me"]), deliveries
)


def course(number: int, message: tuple[Any, ...]) -> Iterator[Event]:
    """Yield the events of a message."""
    gap, topic, is_archived, size, principal, attempts = message
    at, id_ = BEGAN - BEGAN % HOUR + gap, stream(number)
    first = sent(number, at=at, headers=Headers(1, principal=principal))
    yield replace(first, topic=topic, size=size, due=None if is_archived else at)
    version = 1
    for attempt, (pause, duration, outcome, error) in enumerate([] if is_archived else attempts, 1):
        at += pause
        version += 2
        yield MessageReceived(id_, version - 1, at, attempt, at + HOUR, None)
        at += duration
        match outcome:
            case "ack":
                yield MessageAcked(id_, version, at, attempt)
            case "nack":
                yield MessageRequeued(id_, version, at, attempt, at, "nacked", error)
                continue
            case "reject" | "redrive":
                yield MessageDeadLettered(id_, version, at, attempt, "rejected", error, at)
                if outcome == "redrive":
                    version += 1
                    yield MessageRedriven(id_, version, at, at, at)
                    continue
            case "expire":
                yield MessageExpired(id_, version, at, "purged")
        return


def log_of(listed: list[tuple[Any, ...]]) -> list[Event]:
    """Return the events of messages in the order of log time."""
    events = [event for number, each in enumerate(listed, 1) for event in course(number, each)]
    return sorted(events, key=lambda event: (event.at, event.stream, event.version))


logs = st.fixed_dictionaries(dict.fromkeys(BOXES, st.lists(messages, max_size=5).map(log_of)))


def batch_of(written: Logs, events: tuple[str, ...]) -> pa.RecordBatch:
    """Return the rows of `postroom_events` of these types."""
    rows = []
    for mailbox, log in written.items():
        topics = {event.stream: event.topic for event in log if isinstance(event, MessageSent)}
        for position, event in enumerate(log, 1):
            own = {name: getattr(event, name, None) for name in SCHEMA.names}
            headers = event.headers if isinstance(event, MessageSent) else None
            rows.append(
                own
                | {
                    "mailbox": mailbox,
                    "position": position,
                    "event": event.type_name,
                    "message_id": event.stream.hex(),
                    "topic": topics[event.stream],
                    "principal": None if headers is None else headers.principal,
                    "epoch": 1,
                }
            )
    return pa.RecordBatch.from_pylist([row for row in rows if row["event"] in events], SCHEMA)


@pytest.mark.parametrize("name", [*REPORTS])
@settings(max_examples=15)
@given(written=logs)
def test_the_text_of_a_report_says_what_plain_python_does(name: str, written: Logs) -> None:
    report = REPORTS[name]
    now = max((event.at for log in written.values() for event in log), default=0)
    parameters = {"bound": BOUND, "now": now} if name == "sla" else {}
    table = run_report(report, SCHEMA, [batch_of(written, report.events)], parameters)
    micros = table["start"].cast(pa.timestamp("us")).cast(pa.int64())
    rows = table.set_column(0, "start", micros).to_pylist()
    assert rows == figures(name, written, BOUND)
