-- Time from sending to the first receive, from the last receive to the ack, and from sending to the ack.
WITH {messages}
SELECT
    timestamp_micros(sent_at - sent_at % :period) AS start,
    topic,
    count(*) AS messages,
    count(first_received_at) AS received,
    count(acked_at) AS acked,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY first_received_at - sent_at) / 1e3 AS queue_p50_ms,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY first_received_at - sent_at) / 1e3 AS queue_p95_ms,
    percentile_disc(0.99) WITHIN GROUP (ORDER BY first_received_at - sent_at) / 1e3 AS queue_p99_ms,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY acked_at - last_received_at) / 1e3 AS work_p50_ms,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY acked_at - last_received_at) / 1e3 AS work_p95_ms,
    percentile_disc(0.99) WITHIN GROUP (ORDER BY acked_at - last_received_at) / 1e3 AS work_p99_ms,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY acked_at - sent_at) / 1e3 AS total_p50_ms,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY acked_at - sent_at) / 1e3 AS total_p95_ms,
    percentile_disc(0.99) WITHIN GROUP (ORDER BY acked_at - sent_at) / 1e3 AS total_p99_ms
FROM messages
WHERE sent_at >= :since AND sent_at < :until
GROUP BY sent_at - sent_at % :period, topic
ORDER BY start, topic
