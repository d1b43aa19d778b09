-- Failed deliveries, by reason and kind of error.
WITH failures AS (
    SELECT
        e.topic, e.reason, e.fingerprint, e.last_error, e.attempt, unix_micros(e.at) AS micros,
        CASE WHEN e.event = 'MessageRequeued' THEN 'requeued' ELSE 'dead' END AS outcome,
        e.mailbox || ' ' || e.message_id AS message
    FROM {events} AS e
    -- No failures: a redrive job sent a copy, or the consumer released the message.
    WHERE coalesce(e.reason, '') NOT IN ('replaced', 'released')
)
SELECT
    timestamp_micros(micros - micros % :period) AS start,
    topic,
    outcome,
    reason,
    fingerprint,
    count(*) AS failures,
    count(DISTINCT message) AS messages,
    1e0 * sum(attempt) / count(*) AS attempt_mean,
    max(attempt) AS attempt_max,
    min(last_error) AS error
FROM failures
WHERE micros >= :since AND micros < :until
GROUP BY micros - micros % :period, topic, outcome, reason, fingerprint
ORDER BY start, topic NULLS FIRST, outcome, reason, fingerprint
