-- Statements of a service and its relays on the outbox.

-- The size of a payload is that of its jsonb text, which is published, or of the bytes that the text encodes. If one
-- is too large, nothing is written.
-- name: record
WITH new AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb)) AS event (
        stream uuid, version int, type text, at timestamptz, state text,
        aggregate_type text, aggregate_id text, event_type text, event_version int, payload jsonb,
        occurred_at timestamptz, correlation_id uuid, causation_id uuid, data_bytes bigint
    )
), oversized AS MATERIALIZED (
    SELECT CAST(stream AS text) AS id, coalesce(data_bytes, octet_length(CAST(payload AS text))) AS bytes FROM new
    WHERE coalesce(data_bytes, octet_length(CAST(payload AS text))) > CAST(:max_bytes AS bigint) LIMIT 1
), recorded AS (
    INSERT INTO outbox_events (
        id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id,
        causation_id
    )
    SELECT stream, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at,
           correlation_id, causation_id
    FROM new WHERE NOT EXISTS (SELECT FROM oversized)
), history AS (
    INSERT INTO aggregate_events (stream, version, type, at, state)
    SELECT stream, version, type, at, decode(state, 'hex') FROM new
    WHERE NOT EXISTS (SELECT FROM oversized)
)
SELECT CASE WHEN CAST(:wake AS boolean) THEN CAST(pg_notify('postroom_outbox', '') AS text) END,
       (SELECT id FROM oversized), (SELECT bytes FROM oversized);

-- A delayed event has the row of one that waits for a retry.
-- name: delay
WITH delayed AS (
    INSERT INTO outbox_retries (id, aggregate_type, aggregate_id, position, retry_at)
    SELECT event.id, event.aggregate_type, event.aggregate_id, event.position, delay.publish_at
    FROM jsonb_to_recordset(CAST(CAST(:delays AS text) AS jsonb)) AS delay (id uuid, publish_at timestamptz)
    JOIN outbox_events AS event ON event.id = delay.id
)
SELECT true;

-- name: limit_claim
SELECT set_config('idle_in_transaction_session_timeout', :idle_ms, true),
       set_config('lock_timeout', :wait_ms, true);

-- Partition numbers are the keys of the locks.
-- name: claim_free
SELECT partition FROM unnest(CAST(:partitions AS int[])) AS partition
WHERE pg_try_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, partition);

-- name: claim
SELECT pg_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, partition)
FROM unnest(CAST(:partitions AS int[])) AS partition;

-- An event that waits for a retry or is parked blocks later events of its aggregate only.
-- name: find_unpublished
SELECT event.id FROM outbox_events AS event
WHERE event.published_at IS NULL
  AND (hashtextextended(event.aggregate_type || '/' || event.aggregate_id, 0) & 15)
      = ANY(CAST(:partitions AS int[]))
  AND NOT EXISTS (
      SELECT FROM outbox_retries AS retry
      JOIN outbox_events AS waiting ON waiting.id = retry.id AND waiting.published_at IS NULL
      WHERE hashtextextended(retry.aggregate_type || '/' || retry.aggregate_id, 0)
            = hashtextextended(event.aggregate_type || '/' || event.aggregate_id, 0)
        AND retry.aggregate_type = event.aggregate_type AND retry.aggregate_id = event.aggregate_id
        AND retry.position <= event.position AND (retry.retry_at IS NULL OR retry.retry_at > :now)
  )
ORDER BY event.position LIMIT :limit;

-- As `find_unpublished`, but an event of these kinds blocks its aggregate, too. It reads all unpublished events.
-- name: find_besides
SELECT event.id FROM outbox_events AS event
WHERE event.published_at IS NULL
  AND (hashtextextended(event.aggregate_type || '/' || event.aggregate_id, 0) & 15)
      = ANY(CAST(:partitions AS int[]))
  AND NOT EXISTS (
      SELECT FROM outbox_retries AS retry
      JOIN outbox_events AS waiting ON waiting.id = retry.id AND waiting.published_at IS NULL
      WHERE hashtextextended(retry.aggregate_type || '/' || retry.aggregate_id, 0)
            = hashtextextended(event.aggregate_type || '/' || event.aggregate_id, 0)
        AND retry.aggregate_type = event.aggregate_type AND retry.aggregate_id = event.aggregate_id
        AND retry.position <= event.position AND (retry.retry_at IS NULL OR retry.retry_at > :now)
  )
  AND NOT EXISTS (
      SELECT FROM outbox_events AS earlier
      JOIN unnest(CAST(:aggregate_types AS text[]), CAST(:event_types AS text[]), CAST(:event_versions AS int[]))
          AS kind (aggregate_type, event_type, event_version) USING (aggregate_type, event_type, event_version)
      WHERE earlier.published_at IS NULL
        AND earlier.aggregate_type = event.aggregate_type AND earlier.aggregate_id = event.aggregate_id
        AND earlier.position <= event.position
  )
ORDER BY event.position LIMIT :limit;

-- Times are µs since 1970 UTC, NULL if outside the range of drivers. Rows are returned until their payloads exceed
-- `batch_bytes`, at least one.
-- name: load
WITH event AS (
    SELECT id, aggregate_type, aggregate_id, event_type, event_version, occurred_at, correlation_id, causation_id,
           published_at, publish_attempts, publish_error, position,
           CASE WHEN CAST(:with_payload AS boolean) THEN CAST(payload AS text) END AS payload
    FROM outbox_events WHERE id = ANY(CAST(:ids AS uuid[]))
), measured AS (
    SELECT event.*, octet_length(payload) AS bytes,
           sum(octet_length(payload)) OVER (ORDER BY position) - octet_length(payload) AS before
    FROM event
)
SELECT event.id, event.aggregate_type, event.aggregate_id, event.event_type, event.event_version,
       CASE WHEN event.occurred_at >= '0001-01-01 00:00:00+00' AND event.occurred_at < '10000-01-01 00:00:00+00'
            THEN CAST(extract(epoch FROM event.occurred_at) * 1000000 AS bigint) END,
       event.correlation_id, event.causation_id, event.published_at IS NOT NULL,
       CASE WHEN isfinite(event.published_at)
            THEN CAST(extract(epoch FROM event.published_at) * 1000000 AS bigint) END,
       greatest(event.publish_attempts, 0), left(event.publish_error, 1000), retry.id IS NOT NULL,
       CASE WHEN isfinite(retry.retry_at) THEN CAST(extract(epoch FROM retry.retry_at) * 1000000 AS bigint) END,
       event.bytes, CASE WHEN event.bytes <= :max_payload_bytes THEN convert_to(event.payload, 'UTF8') END,
       (SELECT max(version) FROM aggregate_events WHERE stream = event.id), recorded.type, recorded.state
FROM measured AS event
LEFT JOIN outbox_retries AS retry ON retry.id = event.id
LEFT JOIN LATERAL (
    SELECT type, state FROM aggregate_events
    WHERE stream = event.id AND (version = 1 OR starts_with(type, 'OutboxRowRead.'))
    ORDER BY version DESC LIMIT 1
) AS recorded ON true
WHERE event.before IS NULL OR event.before < :batch_bytes
ORDER BY event.position;

-- Delayed events have no error, and are not parked.
-- name: find_failed
SELECT event.id FROM outbox_retries AS retry JOIN outbox_events AS event ON event.id = retry.id
WHERE event.published_at IS NULL
  AND (retry.retry_at IS NULL OR (event.publish_error IS NOT NULL AND NOT :only_parked))
ORDER BY event.position LIMIT :limit;

-- name: next_retry
SELECT CAST(extract(epoch FROM min(retry_at)) * 1000000 AS bigint) FROM outbox_retries WHERE isfinite(retry_at);

-- Changes of events, and the new events of their histories, are passed as JSON (see `as_json`).
-- name: mark_published
WITH mark AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:marks AS text) AS jsonb)) AS mark (id uuid, published_at timestamptz, attempts bigint)
), published AS (
    UPDATE outbox_events AS event
    SET published_at = mark.published_at, publish_attempts = least(mark.attempts, 2147483647), publish_error = NULL
    FROM mark WHERE event.id = mark.id AND event.published_at IS NULL
), settled AS (
    DELETE FROM outbox_retries WHERE id IN (SELECT id FROM mark)
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- name: reschedule
WITH mark AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:marks AS text) AS jsonb)) AS mark (id uuid, attempts bigint, error text, retry_at timestamptz)
), failed AS (
    UPDATE outbox_events AS event
    SET publish_attempts = least(mark.attempts, 2147483647), publish_error = mark.error
    FROM mark WHERE event.id = mark.id
), waiting AS (
    INSERT INTO outbox_retries (id, aggregate_type, aggregate_id, position, retry_at)
    SELECT id, event.aggregate_type, event.aggregate_id, event.position, mark.retry_at
    FROM mark JOIN outbox_events AS event USING (id)
    ON CONFLICT (id) DO UPDATE SET retry_at = excluded.retry_at
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- A held row becomes the event that was read from it, in its place in the order.
-- name: replace
WITH held AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:held AS text) AS jsonb)) AS held (
        id uuid, aggregate_type text, aggregate_id text, event_type text, event_version int, payload jsonb,
        occurred_at timestamptz, correlation_id uuid, causation_id uuid, retry_at timestamptz
    )
), replaced AS (
    UPDATE outbox_events AS event
    SET aggregate_type = held.aggregate_type, aggregate_id = held.aggregate_id, event_type = held.event_type,
        event_version = held.event_version, payload = held.payload,
        occurred_at = least(held.occurred_at, now() + interval '1 minute'),
        correlation_id = held.correlation_id, causation_id = held.causation_id,
        publish_attempts = 0, publish_error = NULL
    FROM held WHERE event.id = held.id
), waiting AS (
    UPDATE outbox_retries AS retry
    SET aggregate_type = held.aggregate_type, aggregate_id = held.aggregate_id, retry_at = held.retry_at
    FROM held WHERE retry.id = held.id
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- name: discard
WITH mark AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:marks AS text) AS jsonb)) AS mark (id uuid)
), discarded AS (
    DELETE FROM outbox_events WHERE id IN (SELECT id FROM mark)
), settled AS (
    DELETE FROM outbox_retries WHERE id IN (SELECT id FROM mark)
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- name: backlog
SELECT count(*), CAST(extract(epoch FROM min(occurred_at) FILTER (
           WHERE occurred_at >= '0001-01-01 00:00:00+00' AND isfinite(occurred_at)
       )) * 1000000 AS bigint)
FROM outbox_events WHERE published_at IS NULL;

-- name: lock_cleanup
SELECT pg_try_advisory_xact_lock(CAST(CAST('outbox_events' AS regclass) AS oid)::int, -1);

-- name: delete_published
WITH old AS MATERIALIZED (
    SELECT id FROM outbox_events WHERE published_at < :before
    ORDER BY published_at LIMIT :limit FOR UPDATE SKIP LOCKED
), history AS (
    DELETE FROM aggregate_events USING old WHERE NOT :keep_history AND stream = old.id
), deleted AS (
    DELETE FROM outbox_events AS event USING old WHERE event.id = old.id RETURNING event.id
)
SELECT count(*) FROM deleted;
