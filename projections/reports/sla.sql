-- Share of messages that were acked within a bound after sending.
WITH {messages},
outcomes AS (
    SELECT
        topic,
        sent_at,
        CASE
            WHEN acked_at - sent_at <= :bound THEN 'within'
            WHEN acked_at IS NOT NULL THEN 'late'
            WHEN removed_at IS NULL AND :now - sent_at <= :bound THEN 'open'
            ELSE 'missed'
        END AS outcome
    FROM messages
    WHERE sent_at >= :since AND sent_at < :until
)
SELECT
    timestamp_micros(sent_at - sent_at % :period) AS start,
    topic,
    count(*) AS messages,
    count(CASE WHEN outcome = 'within' THEN 1 END) AS within,
    count(CASE WHEN outcome = 'late' THEN 1 END) AS late,
    count(CASE WHEN outcome = 'missed' THEN 1 END) AS missed,
    count(CASE WHEN outcome = 'open' THEN 1 END) AS open,
    1e0 * count(CASE WHEN outcome = 'within' THEN 1 END)
        / nullif(count(CASE WHEN outcome <> 'open' THEN 1 END), 0) AS share
FROM outcomes
GROUP BY sent_at - sent_at % :period, topic
ORDER BY start, topic
