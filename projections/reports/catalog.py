"""The built-in reports."""

from postroom.domain.integrity import fingerprint
from postroom.projections.reports.report import Addition, Chart, Report, sql_of

_MESSAGES = sql_of("messages")
_LIFE = ("mailbox", "position", "event", "at", "message_id", "topic", "due")


LATENCY = Report(
    "latency",
    "Time from sending to receiving and acking",
    sql_of("latency").replace("{messages}", _MESSAGES),
    reads=_LIFE,
    events=("MessageSent", "MessageReceived", "MessageAcked"),
    charts=(
        Chart("Sent to acked, p95", "total_p95_ms", unit="ms"),
        Chart("Sent to first received, p95", "queue_p95_ms", unit="ms"),
        Chart("Messages sent", "messages", merge="sum"),
    ),
    only_wide=(
        "received",
        "queue_p50_ms",
        "queue_p99_ms",
        "work_p50_ms",
        "work_p95_ms",
        "work_p99_ms",
        "total_p99_ms",
    ),
    follows=True,
)
SLA = Report(
    "sla",
    "Messages acked within a bound",
    sql_of("sla").replace("{messages}", _MESSAGES),
    reads=_LIFE,
    events=("MessageSent", "MessageAcked", "MessageExpired"),
    charts=(
        Chart("Share acked within the bound", "share"),
        Chart("Messages that missed the bound", "missed", merge="sum"),
    ),
    follows=True,
    defaults={"bound": 60_000_000, "now": 0},
)
TRAFFIC = Report(
    "traffic",
    "Messages sent",
    sql_of("traffic"),
    reads=("at", "topic", "principal", "size"),
    events=("MessageSent",),
    charts=(
        Chart("Messages a second", "per_second", merge="sum"),
        Chart("Bytes of payloads", "bytes", merge="sum"),
        Chart("Messages by principal", "messages", by="principal", merge="sum"),
    ),
    only_wide=("size_p95",),
)
RETRIES = Report(
    "retries",
    "Deliveries that failed",
    sql_of("retries"),
    reads=("mailbox", "event", "at", "message_id", "topic", "reason", "last_error", "attempt"),
    events=("MessageRequeued", "MessageDeadLettered"),
    charts=(
        Chart("Failures by topic", "failures", merge="sum"),
        Chart("Failures by reason", "failures", by="reason", merge="sum"),
        Chart("Failures by kind of error", "failures", by="fingerprint", merge="sum"),
    ),
    only_wide=("fingerprint", "attempt_mean"),
    addition=Addition("fingerprint", fingerprint, ("reason", "last_error")),
)
REPORTS = {report.name: report for report in (LATENCY, RETRIES, TRAFFIC, SLA)}
"""Reports on events, by name."""
