-- Statements of the PostgreSQL event log; `base` is the place before the mailbox's first position.
-- Reads have a range of places, so that the planner prunes the partitions of other mailboxes.

-- name: session
SELECT pid, backend_start, current_setting('fsync') = 'on' FROM pg_stat_activity WHERE pid = pg_backend_pid();

-- name: end_session
SELECT pg_terminate_backend(pid, %(wait_ms)s) FROM pg_stat_activity
WHERE pid = %(pid)s AND backend_start = %(started)s;

-- name: mailbox
SELECT id, partition_positions FROM postroom.mailbox_names WHERE name = %(name)s;

-- name: add_mailbox
INSERT INTO postroom.mailbox_names (name, partition_positions) VALUES (%(name)s, %(positions)s)
ON CONFLICT (name) DO NOTHING;

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT name FROM postroom.mailbox_names WHERE strpos(name, '@') > 0 ORDER BY name COLLATE "C";

-- name: make_partitions
SELECT postroom.make_partitions(%(id)s, %(through)s);

-- name: drop_partitions
SELECT postroom.drop_partitions(%(id)s);

-- name: head
SELECT last, at, chain, epoch FROM postroom.log
WHERE place > %(base)s AND place <= %(top)s ORDER BY place DESC LIMIT 1;

-- name: first_position
SELECT place - %(base)s FROM postroom.log
WHERE place > %(base)s AND place <= %(top)s ORDER BY place LIMIT 1;

-- name: next_position
SELECT place - %(base)s FROM postroom.log
WHERE place >= %(base)s + %(position)s AND place <= %(top)s ORDER BY place LIMIT 1;

-- name: commit_at
-- The commit that holds a position, or the last one before it, if it begins after a position.
SELECT place - %(base)s, last, at FROM postroom.log
WHERE place > %(base)s + %(after)s AND place <= %(base)s + %(position)s ORDER BY place DESC LIMIT 1;

-- name: commits
-- Up to a size, after the first; the length of a value is known without reading it.
SELECT place - %(base)s, last, epoch, at, chain, events, envelopes FROM (
    SELECT place, last, epoch, at, chain, events, envelopes,
        sum(length(events) + length(envelopes)) OVER (ORDER BY place) - length(events) - length(envelopes) AS before
    FROM postroom.log WHERE place >= %(base)s + %(first)s AND place <= %(base)s + %(through)s
) AS commits WHERE before < %(bytes)s ORDER BY place;

-- name: commits_without_envelopes
SELECT place - %(base)s, last, epoch, at, chain, events, ''::bytea FROM postroom.log
WHERE place >= %(base)s + %(first)s AND place <= %(base)s + %(through)s ORDER BY place;

-- name: commits_of
-- `after` and `through` are bounds of where the commits begin, so that the planner leaves out other partitions.
SELECT DISTINCT ON (place) place - %(base)s, last, epoch, at, chain, events,
    CASE WHEN %(envelopes)s THEN envelopes ELSE '' END
FROM unnest(%(positions)s::bigint[]) AS input (position), LATERAL (
    SELECT * FROM postroom.log
    WHERE place > %(base)s + %(after)s AND place <= %(base)s + %(through)s AND place <= %(base)s + input.position
    ORDER BY place DESC LIMIT 1
) AS found WHERE last >= position ORDER BY place;

-- name: index_of
SELECT uuid_send(stream), version, place - %(base)s, CASE WHEN version = 1 AND last > place THEN last - %(base)s END
FROM (
    SELECT stream, version, place, max(place) FILTER (WHERE version IS NULL) OVER (PARTITION BY stream) AS last
    FROM postroom.log_index
    WHERE stream = ANY(%(streams)s::uuid[]) AND place > %(base)s AND place <= %(top)s
) AS entries WHERE version IS NOT NULL ORDER BY stream, version;

-- name: streams_between
SELECT uuid_send(stream) FROM postroom.log_index
WHERE stream >= %(first)s::uuid AND stream <= %(last)s::uuid AND version = 1
    AND place > %(base)s AND place <= %(top)s
ORDER BY stream LIMIT %(limit)s;

-- name: mark_removed
UPDATE postroom.mailbox_names SET removed_through = greatest(removed_through, %(through)s) WHERE id = %(id)s;

-- name: appends_under_way
SELECT virtualtransaction FROM pg_locks
WHERE relation = 'postroom.log'::regclass AND mode = 'RowExclusiveLock' AND pid <> pg_backend_pid()
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: delete_entries
DELETE FROM postroom.log_index
WHERE stream = ANY(%(streams)s::uuid[])
    AND place >= %(base)s + %(first)s AND place <= %(base)s + %(through)s;

-- name: truncate
WITH entries AS (
    DELETE FROM postroom.log_index
    WHERE stream = ANY(%(streams)s::uuid[])
        AND place >= %(base)s + %(first)s AND place <= %(base)s + %(through)s
)
DELETE FROM postroom.log WHERE place >= %(base)s + %(first)s AND place <= %(base)s + %(through)s;

-- name: size
SELECT
    coalesce(sum(bytes * (last - greatest(first, removed_through)) / greatest(last - first, 1)), 0)::bigint,
    coalesce(sum(bytes), 0)::bigint
FROM (
    SELECT
        removed_through,
        number * partition_positions AS first,
        greatest(least(%(head)s, (number + 1) * partition_positions), removed_through) AS last,
        pg_total_relation_size(to_regclass(format('postroom.log_%%s_%%s', id, number)))
            + pg_total_relation_size(to_regclass(format('postroom.log_index_%%s_%%s', id, number))) AS bytes
    FROM postroom.mailbox_names, generate_series(
        removed_through / partition_positions, greatest(%(head)s - 1, removed_through) / partition_positions
    ) AS number
    WHERE id = %(id)s
) AS partitions;

-- name: sizes
-- A row takes about 150 bytes besides its large values, and an entry of the index 100.
SELECT max(last), sum(bytes)::bigint FROM (
    SELECT last, 150 + length(events) + length(envelopes) + (last - place + %(base)s + 1) * 25 AS bytes
    FROM postroom.log WHERE place > %(base)s + %(after)s AND place <= %(top)s ORDER BY place LIMIT %(limit)s
) AS oldest;

-- name: save_snapshot
INSERT INTO postroom.snapshot (place, chain, state) VALUES (%(base)s + %(position)s, %(chain)s, %(state)s)
ON CONFLICT (place) DO UPDATE SET chain = excluded.chain, state = excluded.state;

-- name: drop_snapshots
DELETE FROM postroom.snapshot WHERE place > %(base)s AND place < %(base)s + %(before)s;

-- name: snapshot_positions
SELECT place - %(base)s FROM postroom.snapshot
WHERE place > %(base)s AND place <= %(top)s ORDER BY place DESC;

-- name: snapshot
SELECT place - %(base)s, chain, state FROM postroom.snapshot WHERE place = %(base)s + %(position)s;

-- name: seal
-- A stale owner that closes late must not overwrite a newer seal.
INSERT INTO postroom.seal (base, position, chain) VALUES (%(base)s, %(position)s, %(chain)s)
ON CONFLICT (base) DO UPDATE SET position = excluded.position, chain = excluded.chain
WHERE excluded.position > seal.position;

-- name: sealed
SELECT position, chain FROM postroom.seal WHERE base = %(base)s;
