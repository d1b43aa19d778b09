-- Captured events that wait in the outbox table.

-- name: find_waiting
SELECT DISTINCT aggregate_type, aggregate_id FROM outbox_events
WHERE published_at IS NULL
  AND (aggregate_type, aggregate_id) IN (
      SELECT * FROM unnest(CAST(:types AS text[]), CAST(:ids AS text[]))
  );

-- Events are added in the order of the JSON array. One that is in the outbox already was captured twice. One without a
-- time can't be read; one after `now` is of a server whose clock is ahead, and the table refuses it.
-- name: hold
WITH held AS MATERIALIZED (
    SELECT * FROM jsonb_to_recordset(CAST(CAST(:held AS text) AS jsonb)) AS held (
        id uuid, aggregate_type text, aggregate_id text, event_type text, event_version int, payload jsonb,
        occurred_at timestamptz, correlation_id uuid, causation_id uuid, attempts int, error text,
        has_failed boolean, retry_at timestamptz
    )
), added AS (
    INSERT INTO outbox_events (
        id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, correlation_id,
        causation_id, publish_attempts, publish_error
    )
    SELECT id, aggregate_type, aggregate_id, event_type, event_version, payload,
           CASE WHEN occurred_at IS NULL THEN '-infinity' ELSE least(occurred_at, now() + interval '1 minute') END,
           correlation_id, causation_id, attempts, error
    FROM held
    ON CONFLICT (id) DO NOTHING
    RETURNING id, aggregate_type, aggregate_id, position
), failed AS (
    INSERT INTO outbox_retries (id, aggregate_type, aggregate_id, position, retry_at)
    SELECT added.id, added.aggregate_type, added.aggregate_id, added.position, held.retry_at
    FROM added JOIN held USING (id) WHERE held.has_failed
    ON CONFLICT (id) DO NOTHING
)
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text)
JOIN added ON added.id = event.stream
ON CONFLICT (stream, version) DO NOTHING;
