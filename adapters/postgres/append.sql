-- Appends to a PostgreSQL log. Nothing is inserted where retention removed the first position: another process owns the
-- log. An index on place or on stream and version refuses what is there already. A follower that waits holds the lock
-- exclusively (ADR 0138).

-- name: append
WITH guard AS (
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock_shared('postroom.log'::regclass::oid::int, 100)
        THEN pg_notify('postroom_log', 'postroom')::text END
    FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint
)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;

-- name: append_first_events
WITH guard AS (
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock_shared('postroom.log'::regclass::oid::int, 100)
        THEN pg_notify('postroom_log', 'postroom')::text END
    FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint
),
entries AS (
    INSERT INTO postroom.log_index (place, version, stream)
    SELECT place, 1, stream FROM guard, unnest(%(entry_places)s::bigint[], %(streams)s::uuid[]) AS rows (place, stream)
)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;

-- name: append_with_versions
WITH guard AS (
    SELECT CASE WHEN NOT pg_try_advisory_xact_lock_shared('postroom.log'::regclass::oid::int, 100)
        THEN pg_notify('postroom_log', 'postroom')::text END
    FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint
),
entries AS (
    INSERT INTO postroom.log_index (place, stream, version)
    SELECT rows.* FROM guard, unnest(%(entry_places)s::bigint[], %(streams)s::uuid[], %(versions)s::bigint[]) AS rows
)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;
