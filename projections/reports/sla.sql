-- Share of messages that were acked within a bound after sending.
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
        max(CASE WHEN event = 'MessageAcked' THEN micros END) AS acked_at,
        max(CASE WHEN event = 'MessageExpired' THEN micros END) AS removed_at
    FROM steps
    WHERE sending > 0
    GROUP BY mailbox, message_id, sending
),
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
