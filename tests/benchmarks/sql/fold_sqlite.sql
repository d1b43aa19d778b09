-- The mailbox rows of a SQLite log, in one statement; as fold_postgres.sql. `last_error` decodes a `dead_lettering`'s state.
WITH cut AS MATERIALIZED (
    SELECT names.id, names.name,
        (SELECT at FROM store.log WHERE place > names.id << 40 AND place < (names.id + 1) << 40
            ORDER BY place DESC LIMIT 1) AS at
    FROM store.mailbox_names AS names
), later AS MATERIALIZED (
    SELECT
        place >> 40 AS mailbox_id,
        stream,
        max(version << 3 | CASE type
            WHEN 'MessageAcked.1' THEN 0
            WHEN 'MessageReceived.1' THEN 1
            WHEN 'MessageVisibilityExtended.1' THEN 1
            WHEN 'MessageRequeued.1' THEN 2
            WHEN 'MessageRedriven.1' THEN 2
            WHEN 'MessageDeadLettered.1' THEN 3
            WHEN 'MessageExpired.1' THEN 4
        END) AS last,
        max(version << 24 | CASE WHEN type = 'MessageRedriven.1' THEN 0 ELSE attempt END) AS last_attempt,
        max(at) AS changed_at,
        sum(type = 'MessageRedriven.1') AS redriven
    FROM store.log
    WHERE type >= 'Message' AND type < 'Messagf' AND type <> 'MessageSent.3'
    GROUP BY stream, place >> 40
), requeued AS MATERIALIZED (
    SELECT place >> 40 AS mailbox_id, stream, version, due
    FROM store.log
    WHERE type IN ('MessageRequeued.1', 'MessageRedriven.1')
), fate AS MATERIALIZED (
    SELECT
        place >> 40 AS mailbox_id, stream, version, type, at, reason, attempt, state,
        lead(CASE WHEN type = 'MessageRedriven.1' THEN at END)
            OVER (PARTITION BY place >> 40, stream ORDER BY version) AS redriven_at
    FROM store.log
    WHERE type IN ('MessageDeadLettered.1', 'MessageRedriven.1')
), dead_lettering AS MATERIALIZED (
    SELECT mailbox_id, stream, '[' || group_concat(
        '{"at":' || at || ',"reason":' || json_quote(reason) || ',"attempt":' || attempt
        || coalesce(',"last_error":' || json_quote(last_error(state)), '')
        || coalesce(',"redriven_at":' || redriven_at, '') || '}',
        ','
    ) || ']' AS dead_letterings
    FROM (SELECT * FROM fate WHERE type = 'MessageDeadLettered.1' ORDER BY mailbox_id, stream, version)
    GROUP BY mailbox_id, stream
)
INSERT INTO mailbox_v{version} (
    id, message_id, timestamp, topic, content_type, schema_url, schema_version, encryption, correlation_id, principal,
    namespace, trace_id, span_id, custom_headers, created_at, mailbox, position, shard, status, attempts, redriven,
    changed_at, due, dead_letterings, stream, envelope_blob
)
SELECT
    sent.place,
    coalesce(sent.message_id, uuid(sent.stream)),
    sent.timestamp, sent.topic, sent.content_type, sent.schema_url, sent.schema_version, sent.encryption,
    sent.correlation_id, sent.principal, sent.namespace, sent.trace_id, sent.span_id, sent.custom_headers,
    sent.at,
    cut.name,
    sent.place & ((1 << 40) - 1),
    sent.shard,
    CASE
        WHEN later.last & 7 = 0 THEN 'acked'
        WHEN later.last IS NULL AND sent.due IS NULL THEN 'archived'
        WHEN later.last IS NULL AND sent.due > cut.at THEN 'delayed'
        WHEN later.last IS NULL THEN 'ready'
        WHEN later.last & 7 = 1 THEN 'in_flight'
        WHEN later.last & 7 = 2 AND requeued.due > cut.at THEN 'delayed'
        WHEN later.last & 7 = 2 THEN 'ready'
        WHEN later.last & 7 = 3 THEN 'dead'
        WHEN later.last & 7 = 4 THEN 'expired'
    END,
    coalesce(later.last_attempt & ((1 << 24) - 1), 0),
    coalesce(later.redriven, 0),
    coalesce(later.changed_at, sent.at),
    CASE WHEN later.last IS NULL THEN sent.due WHEN later.last & 7 = 2 THEN requeued.due END,
    dead_lettering.dead_letterings,
    sent.stream,
    sent.envelope
FROM store.log AS sent
JOIN cut ON cut.id = sent.place >> 40
LEFT JOIN later ON later.stream = sent.stream AND later.mailbox_id = sent.place >> 40
LEFT JOIN requeued ON requeued.stream = sent.stream AND requeued.mailbox_id = sent.place >> 40
    AND requeued.version = later.last >> 3
LEFT JOIN dead_lettering ON dead_lettering.stream = sent.stream AND dead_lettering.mailbox_id = sent.place >> 40
WHERE sent.type = 'MessageSent.3'
ORDER BY sent.place;
