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

-- name: add
INSERT INTO inbox_messages (message_id, subject, received_at)
SELECT message_id, subject, received_at
FROM jsonb_to_recordset(CAST(CAST(:messages AS text) AS jsonb))
    AS message (message_id uuid, subject text, received_at timestamptz)
ON CONFLICT (message_id) DO NOTHING;

-- name: load
SELECT message_id, subject, received_at, processed_at, attempts, last_error, version, dead_lettered_at
FROM inbox_messages WHERE message_id = ANY(:ids)
FOR UPDATE SKIP LOCKED;

-- name: deliveries_in_progress
SELECT stream, at
FROM aggregate_events
JOIN unnest(CAST(:streams AS uuid[]), CAST(:versions AS int[])) AS latest (stream, version) USING (stream, version)
WHERE type LIKE 'InboxMessageReceived.%';

-- name: update
UPDATE inbox_messages AS stored
SET processed_at = message.processed_at, attempts = message.attempts, last_error = message.last_error,
    version = message.version, dead_lettered_at = message.dead_lettered_at
FROM jsonb_to_recordset(CAST(CAST(:messages AS text) AS jsonb)) AS message (
    message_id uuid, processed_at timestamptz, attempts int, last_error text, version int,
    dead_lettered_at timestamptz
)
WHERE stored.message_id = message.message_id;

-- name: backlog
SELECT count(*), CAST(extract(epoch FROM min(received_at) FILTER (
           WHERE received_at >= '0001-01-01 00:00:00+00' AND isfinite(received_at)
       )) * 1000000 AS bigint)
FROM inbox_messages
WHERE processed_at IS NULL AND dead_lettered_at IS NULL;

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

-- name: lock_transaction
SELECT pg_try_advisory_xact_lock(hashtextextended(:task, 0));
