-- The mailbox rows of a log, from what was read of it: `sent` and `later` records, the `cut`, and `dead_lettering`.
SELECT
    sent.place AS id,
    coalesce(sent.message_id, concat_ws(
        '-', substr(digits, 1, 8), substr(digits, 9, 4), substr(digits, 13, 4), substr(digits, 17, 4),
        substr(digits, 21, 12)
    )) AS message_id,
    sent.timestamp, sent.topic, sent.content_type, sent.schema_url, sent.schema_version, sent.encryption,
    sent.correlation_id, sent.principal, sent.namespace, sent.trace_id, sent.span_id, sent.custom_headers,
    sent."at" AS created_at,
    cut.name AS mailbox,
    sent.place & ((1::BIGINT << 40) - 1) AS position,
    sent.shard,
    CASE
        WHEN folded.event IS NULL AND sent.due IS NULL THEN 'archived'
        WHEN coalesce(folded.event, '') IN ('', 'MessageRequeued', 'MessageRedriven')
            THEN CASE WHEN coalesce(folded.due, sent.due) > cut."at" THEN 'delayed' ELSE 'ready' END
        WHEN folded.event = 'MessageAcked' THEN 'acked'
        WHEN folded.event IN ('MessageReceived', 'MessageVisibilityExtended') THEN 'in_flight'
        WHEN folded.event = 'MessageDeadLettered' THEN 'dead'
        WHEN folded.event = 'MessageExpired' THEN 'expired'
    END AS status,
    coalesce(folded.attempts, 0) AS attempts,
    coalesce(folded.redriven, 0)::BIGINT AS redriven,
    coalesce(folded.changed_at, sent."at") AS changed_at,
    CASE
        WHEN folded.event IS NULL THEN sent.due
        WHEN folded.event IN ('MessageRequeued', 'MessageRedriven') THEN folded.due
    END AS due,
    dead_lettering.dead_letterings,
    sent.stream,
    sent.envelope AS envelope_blob
FROM (SELECT *, lower(hex(stream)) AS digits FROM sent) AS sent
JOIN cut ON cut.id = sent.place >> 40
LEFT JOIN (
    SELECT
        place >> 40 AS mailbox_id,
        stream,
        arg_max(event, version) AS event,
        arg_max_null(due, version) AS due,
        arg_max(CASE WHEN event = 'MessageRedriven' THEN 0 ELSE attempt END, version) AS attempts,
        max("at") AS changed_at,
        count(*) FILTER (event = 'MessageRedriven') AS redriven
    FROM later
    GROUP BY ALL
) AS folded ON folded.mailbox_id = sent.place >> 40 AND folded.stream = sent.stream
LEFT JOIN dead_lettering ON dead_lettering.mailbox_id = sent.place >> 40 AND dead_lettering.stream = sent.stream
ORDER BY sent.place;
