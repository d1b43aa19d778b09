-- Statements on the histories of aggregates, for the `eventsourcing` library.

-- name: savepoint
SAVEPOINT postroom_events;

-- name: release
RELEASE SAVEPOINT postroom_events;

-- name: rollback
ROLLBACK TO SAVEPOINT postroom_events;

-- name: insert
INSERT INTO aggregate_events (stream, version, type, at, state)
SELECT stream, version, type, at, decode(state, 'hex')
FROM jsonb_to_recordset(CAST(CAST(:events AS text) AS jsonb))
    AS event (stream uuid, version int, type text, at timestamptz, state text);

-- name: select_forwards
SELECT version, type, at, state FROM aggregate_events
WHERE stream = CAST(:stream AS uuid) AND version > :gt AND version <= :lte
ORDER BY version LIMIT :limit;

-- name: select_backwards
SELECT version, type, at, state FROM aggregate_events
WHERE stream = CAST(:stream AS uuid) AND version > :gt AND version <= :lte
ORDER BY version DESC LIMIT :limit;
