-- Appends to a PostgreSQL log. Nothing is inserted where retention removed the first position: another process owns the
-- log. An index on place or on stream and version refuses what is there already.

-- name: append
WITH guard AS (SELECT FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;

-- name: append_messages
-- All entries are those of first events.
WITH guard AS (SELECT FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint),
entries AS (
    INSERT INTO postroom.log_index (place, version, stream)
    SELECT place, 1, stream FROM guard, unnest(%(entry_places)s::bigint[], %(streams)s::uuid[]) AS rows (place, stream)
)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;

-- name: append_and_update
-- With the entries of any events, and updates of earlier ones. `low` and `high` are constants, so that the planner
-- leaves out the partitions that are not updated.
WITH guard AS (SELECT FROM postroom.mailbox_names WHERE id = %(id)s::bigint AND removed_through < %(first)s::bigint),
entries AS (
    INSERT INTO postroom.log_index (place, version, stream, last)
    SELECT rows.* FROM guard, unnest(
        %(entry_places)s::bigint[], %(versions)s::bigint[], %(streams)s::uuid[], %(entry_lasts)s::bigint[]
    ) AS rows
),
updates AS (
    UPDATE postroom.log_index AS entry SET last = rows.last
    FROM guard, unnest(%(updated_places)s::bigint[], %(updated_streams)s::uuid[], %(updated_lasts)s::bigint[])
        AS rows (place, stream, last)
    WHERE entry.stream = rows.stream AND entry.place = rows.place
        AND entry.place >= {low} AND entry.place < {high}
)
INSERT INTO postroom.log (place, last, epoch, at, chain, events, envelopes)
SELECT rows.* FROM guard, unnest(
    %(places)s::bigint[], %(lasts)s::bigint[], %(epochs)s::bigint[], %(ats)s::bigint[], %(chains)s::bytea[],
    %(events)s::bytea[], %(envelopes)s::bytea[]
) AS rows;
