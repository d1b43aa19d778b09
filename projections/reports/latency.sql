-- Time from sending to the first receive, from the last receive to the ack, and from sending to the ack.
WITH steps AS (
    SELECT
        e.mailbox, e.message_id, e.topic, e.event, unix_micros(e.at) AS micros,
        -- An id may be reused after retention removed its message: each send is counted as a separate message.
        count(CASE WHEN e.event = 'MessageSent' THEN 1 END)
            OVER (PARTITION BY e.mailbox, e.message_id ORDER BY e.position) AS sending
    FROM {events} AS e
    -- The id is null where retention removed the message; an archived message has no due time.
    WHERE e.message_id IS NOT NULL AND (e.event <> 'MessageSent' OR e.due IS NOT NULL)
),
messages AS (
    SELECT
        min(topic) AS topic,
        min(CASE WHEN event = 'MessageSent' THEN micros END) AS sent_at,
        min(CASE WHEN event = 'MessageReceived' THEN micros END) AS first_received_at,
        max(CASE WHEN event = 'MessageReceived' THEN micros END) AS last_received_at,
        max(CASE WHEN event = 'MessageAcked' THEN micros END) AS acked_at
    FROM steps
    WHERE sending > 0
    GROUP BY mailbox, message_id, sending
)
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
