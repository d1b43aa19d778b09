-- Common table expressions: a row for each message, with the times of its events in µs.
steps AS (
    SELECT
        e.mailbox, e.message_id, e.topic, e.event, unix_micros(e.at) AS micros,
        -- An id may be reused after retention removed its message: each send is counted as a separate message.
        count(CASE WHEN e.event = 'MessageSent' THEN 1 END)
            OVER (PARTITION BY e.mailbox, e.topic, e.message_id ORDER BY e.position) AS sending
    FROM {events} AS e
    -- The id is null where retention removed the message; an archived message has no due time.
    WHERE e.message_id IS NOT NULL AND (e.event <> 'MessageSent' OR e.due IS NOT NULL)
),
messages AS (
    SELECT
        topic,
        min(CASE WHEN event = 'MessageSent' THEN micros END) AS sent_at,
        min(CASE WHEN event = 'MessageReceived' THEN micros END) AS first_received_at,
        max(CASE WHEN event = 'MessageReceived' THEN micros END) AS last_received_at,
        max(CASE WHEN event = 'MessageAcked' THEN micros END) AS acked_at,
        max(CASE WHEN event = 'MessageExpired' THEN micros END) AS removed_at
    FROM steps
    WHERE sending > 0
    GROUP BY mailbox, topic, message_id, sending
)
