-- Statements on the inbox, for batches of messages; rows are passed as JSON (see `as_json`).

-- name: insert_processed
INSERT INTO inbox_messages AS stored (message_id, subject, received_at, processed_at, attempts, version)
VALUES (
    CAST(CAST(:message_id AS text) AS uuid), CAST(:subject AS text), CAST(CAST(:at AS text) AS timestamptz),
    CAST(CAST(:at AS text) AS timestamptz), 1, 2
)
ON CONFLICT (message_id) DO UPDATE
SET processed_at = greatest(stored.received_at, excluded.processed_at),
    version = stored.version + 1,
    dead_lettered_at = NULL
WHERE stored.processed_at IS NULL
RETURNING xmax = 0, version, subject, received_at, processed_at, attempts, last_error;

-- name: insert_events
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- Changes whose rows are locked, or not of the expected version, are left out; the result has the others. Arrays make the
-- planner, which expects 100 changes, find rows by the index even where a scan of the table seems as cheap.
-- name: write
WITH change AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:changes AS text) AS jsonb)) AS change (
        message_id uuid, subject text, received_at timestamptz, processed_at timestamptz, attempts int, last_error text,
        version int, dead_lettered_at timestamptz, expected int, stream uuid, type text, at timestamptz, state text
    )
), added AS (
    INSERT INTO inbox_messages (message_id, subject, received_at, attempts, version)
    SELECT message_id, subject, received_at, attempts, version FROM change WHERE expected = 0
    ORDER BY message_id
    ON CONFLICT (message_id) DO NOTHING
    RETURNING message_id
), locked AS MATERIALIZED (
    SELECT stored.message_id FROM change JOIN inbox_messages AS stored USING (message_id)
    WHERE stored.message_id = ANY(ARRAY(SELECT message_id FROM change)) AND stored.version = change.expected
    FOR UPDATE OF stored SKIP LOCKED
), updated AS (
    UPDATE inbox_messages AS stored
    SET processed_at = change.processed_at, attempts = change.attempts, last_error = change.last_error,
        version = change.version, dead_lettered_at = change.dead_lettered_at
    FROM change
    WHERE stored.message_id = ANY(ARRAY(SELECT message_id FROM locked)) AND stored.message_id = change.message_id
    RETURNING stored.message_id
), written AS (
    SELECT message_id FROM added UNION ALL SELECT message_id FROM updated
), history AS (
    INSERT INTO aggregate_events (stream, version, type, at, state)
    SELECT stream, version, type, at, decode(state, 'hex') FROM change JOIN written USING (message_id)
)
SELECT message_id FROM written;

-- The time at which a delivery in progress began is that of the history's last event.
-- name: load
SELECT stored.message_id, stored.subject, stored.received_at, stored.processed_at, stored.attempts, stored.last_error,
       stored.version, stored.dead_lettered_at, delivery.at
FROM unnest(CAST(:ids AS uuid[]), CAST(:streams AS uuid[])) AS wanted (message_id, stream)
JOIN inbox_messages AS stored USING (message_id)
LEFT JOIN aggregate_events AS delivery
    ON delivery.stream = wanted.stream AND delivery.version = stored.version
    AND delivery.type LIKE 'InboxMessageReceived.%';

-- name: backlog
SELECT count(*), CAST(extract(epoch FROM min(received_at) FILTER (
           WHERE received_at >= '0001-01-01 00:00:00+00' AND isfinite(received_at)
       )) * 1000000 AS bigint)
FROM inbox_messages
WHERE processed_at IS NULL AND dead_lettered_at IS NULL;

-- Messages of ordered workers by consumer and partition, with the first of each in the order of the stream.
-- name: queue_backlog
SELECT consumer, partition, count(*), (array_agg(sequence ORDER BY position))[1],
       CAST(extract(epoch FROM min(added_at)) * 1000000 AS bigint)
FROM inbox_queue
WHERE CAST(:consumer AS text) IS NULL OR consumer = CAST(:consumer AS text)
GROUP BY consumer, partition
ORDER BY consumer, partition;

-- name: delete
DELETE FROM inbox_messages WHERE message_id IN (
    SELECT message_id FROM inbox_messages WHERE processed_at < :before
    ORDER BY processed_at LIMIT :limit
    FOR UPDATE SKIP LOCKED
)
RETURNING message_id;

-- name: delete_events
DELETE FROM aggregate_events WHERE stream = ANY(:streams);

-- name: lock
SELECT pg_try_advisory_lock(hashtextextended(:task, 0));

-- name: unlock
SELECT pg_advisory_unlock_all();

-- name: lock_transaction
SELECT pg_try_advisory_xact_lock(hashtextextended(:task, 0));
