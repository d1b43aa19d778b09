"""Median and p95 from sending to the ack, by topic and hour: `postroom report run ack_times`."""

from postroom import Chart, Report

SQL = """
WITH messages AS (
    SELECT
        min(e.topic) AS topic,
        min(CASE WHEN e.event = 'MessageSent' THEN unix_micros(e.at) END) AS sent_at,
        max(CASE WHEN e.event = 'MessageAcked' THEN unix_micros(e.at) END) AS acked_at
    FROM {events} AS e
    WHERE e.message_id IS NOT NULL
    GROUP BY e.mailbox, e.message_id
)
SELECT
    timestamp_micros(sent_at - sent_at % :period) AS start,
    topic,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY acked_at - sent_at) / 1e3 AS median_ms,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY acked_at - sent_at) / 1e3 AS p95_ms
FROM messages
WHERE sent_at >= :since AND sent_at < :until
GROUP BY sent_at - sent_at % :period, topic
ORDER BY start, topic
"""

REPORT = Report(
    "ack_times",
    "From sending to the ack",
    SQL,
    reads=("mailbox", "event", "at", "message_id", "topic"),
    events=("MessageSent", "MessageAcked"),
    charts=(Chart("p95", "p95_ms", unit="ms"),),
    follows=True,
)
