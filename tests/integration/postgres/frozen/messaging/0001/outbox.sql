-- What a service and its relays do with the outbox.

-- name: record
WITH new AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb)) AS event (
        stream uuid, version int, type text, at timestamptz, state text,
        aggregate_type text, aggregate_id text, event_type text, event_version int, payload jsonb,
        occurred_at timestamptz, correlation_id uuid, causation_id uuid
    )
), recorded AS (
    INSERT INTO outbox_events (
        id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id,
        causation_id
    )
    SELECT stream, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
           correlation_id, causation_id
    FROM new
), history AS (
    INSERT INTO aggregate_events (stream, version, type, at, state)
    SELECT stream, version, type, at, decode(state, 'hex') FROM new
)
SELECT CASE WHEN CAST(:wake AS boolean) THEN CAST(pg_notify('postroom_outbox', '') AS text) END;

-- name: listen
LISTEN postroom_outbox;

-- name: limit_claim
SELECT set_config('idle_in_transaction_session_timeout', :idle_ms, true),
       set_config('lock_timeout', :wait_ms, true);

-- The number of partitions is part of what the locks mean: it never changes.
-- name: claim_free
SELECT partition FROM unnest(CAST(:partitions AS int[])) AS partition
WHERE pg_try_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, partition);

-- name: claim
SELECT pg_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, partition)
FROM unnest(CAST(:partitions AS int[])) AS partition;

-- An event that waits holds back the later ones of its aggregate, and no others. Of many large payloads as many are
-- returned as fit into `batch_bytes`, and always the first.
-- name: find_unpublished
WITH found AS (
    SELECT event.id, event.aggregate_type, event.aggregate_id, event.event_type, event.event_version,
           event.occurred_at, event.correlation_id, event.causation_id, event.publish_attempts,
           event.publish_error, event.published_at, convert_to(CAST(event.payload AS text), 'UTF8') AS payload,
           retry.id IS NOT NULL AS failed, retry.retry_at,
           (SELECT max(version) FROM aggregate_events WHERE stream = event.id) AS version, recorded.type,
           recorded.state, event.position
    FROM outbox_events AS event
    LEFT JOIN outbox_retries AS retry ON retry.id = event.id
    LEFT JOIN aggregate_events AS recorded ON recorded.stream = event.id AND recorded.version = 1
    WHERE event.published_at IS NULL
      AND (hashtextextended(event.aggregate_type || '/' || event.aggregate_id, 0) & 15)
          = ANY(CAST(:partitions AS int[]))
      AND NOT EXISTS (
          SELECT FROM outbox_retries AS held
          JOIN outbox_events AS waiting ON waiting.id = held.id AND waiting.published_at IS NULL
          WHERE held.aggregate_type = event.aggregate_type AND held.aggregate_id = event.aggregate_id
            AND held.position <= event.position AND (held.retry_at IS NULL OR held.retry_at > :now)
      )
    ORDER BY event.position LIMIT :limit
), measured AS (
    SELECT found.*, sum(octet_length(payload)) OVER (ORDER BY position) - octet_length(payload) AS before
    FROM found
)
SELECT id, aggregate_type, aggregate_id, event_type, event_version, occurred_at, correlation_id, causation_id,
       publish_attempts, publish_error, published_at, payload, failed, retry_at, version, type, state
FROM measured WHERE before < :batch_bytes ORDER BY position;

-- name: find
SELECT event.id, event.aggregate_type, event.aggregate_id, event.event_type, event.event_version,
       event.occurred_at, event.correlation_id, event.causation_id, event.publish_attempts,
       event.publish_error, event.published_at, convert_to(CAST(event.payload AS text), 'UTF8'),
       retry.id IS NOT NULL, retry.retry_at,
       (SELECT max(version) FROM aggregate_events WHERE stream = event.id), recorded.type, recorded.state
FROM outbox_events AS event
LEFT JOIN outbox_retries AS retry ON retry.id = event.id
LEFT JOIN aggregate_events AS recorded ON recorded.stream = event.id AND recorded.version = 1
WHERE event.id = ANY(CAST(:ids AS uuid[]))
ORDER BY event.position;

-- name: find_failed
SELECT event.id FROM outbox_retries AS retry JOIN outbox_events AS event ON event.id = retry.id
WHERE event.published_at IS NULL AND (retry.retry_at IS NULL OR NOT :only_parked)
ORDER BY event.position LIMIT :limit;

-- name: mark_published
WITH published AS (
    UPDATE outbox_events AS event
    SET published_at = mark.published_at, publish_attempts = mark.attempts, publish_error = NULL
    FROM unnest(CAST(:ids AS uuid[]), CAST(:published_at AS timestamptz[]), CAST(:attempts AS int[]))
        AS mark (id, published_at, attempts)
    WHERE event.id = mark.id AND event.published_at IS NULL
), settled AS (
    DELETE FROM outbox_retries WHERE id = ANY(CAST(:ids AS uuid[]))
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT * FROM unnest(
    CAST(:streams AS uuid[]), CAST(:versions AS int[]), CAST(:types AS text[]), CAST(:ats AS timestamptz[]),
    CAST(:states AS bytea[])
);

-- name: reschedule
WITH mark AS MATERIALIZED (
    SELECT * FROM unnest(
        CAST(:ids AS uuid[]), CAST(:attempts AS int[]), CAST(:errors AS text[]), CAST(:retry_at AS timestamptz[])
    ) AS mark (id, attempts, error, retry_at)
), failed AS (
    UPDATE outbox_events AS event SET publish_attempts = mark.attempts, publish_error = mark.error
    FROM mark WHERE event.id = mark.id
), waiting AS (
    INSERT INTO outbox_retries (id, aggregate_type, aggregate_id, position, retry_at)
    SELECT id, event.aggregate_type, event.aggregate_id, event.position, mark.retry_at
    FROM mark JOIN outbox_events AS event USING (id)
    ON CONFLICT (id) DO UPDATE SET retry_at = excluded.retry_at
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT * FROM unnest(
    CAST(:streams AS uuid[]), CAST(:versions AS int[]), CAST(:types AS text[]), CAST(:ats AS timestamptz[]),
    CAST(:states AS bytea[])
);

-- name: discard
WITH discarded AS (
    DELETE FROM outbox_events WHERE id = ANY(CAST(:ids AS uuid[]))
), settled AS (
    DELETE FROM outbox_retries WHERE id = ANY(CAST(:ids AS uuid[]))
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT * FROM unnest(
    CAST(:streams AS uuid[]), CAST(:versions AS int[]), CAST(:types AS text[]), CAST(:ats AS timestamptz[]),
    CAST(:states AS bytea[])
);

-- name: backlog
SELECT count(*), min(occurred_at) FROM outbox_events WHERE published_at IS NULL;

-- name: clean_alone
SELECT pg_try_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, -1);

-- name: delete_published
WITH old AS MATERIALIZED (
    SELECT id FROM outbox_events WHERE published_at < :before
    ORDER BY published_at LIMIT :limit FOR UPDATE SKIP LOCKED
), history AS (
    DELETE FROM aggregate_events USING old WHERE NOT :keep_history AND stream = old.id
), gone AS (
    DELETE FROM outbox_events AS event USING old WHERE event.id = old.id RETURNING event.id
)
SELECT count(*) FROM gone;
