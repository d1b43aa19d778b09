-- Statements of queries on the read models, in addition to the generated ones.

-- name: begin
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY;

-- name: active
SELECT version, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN models END FROM postroom.projection WHERE status = 'active';

-- name: allow_bitmap_scans
SET LOCAL enable_bitmapscan = on;

-- name: plan_of_words
EXPLAIN SELECT FROM postroom.{text}
WHERE array_to_tsvector(array_remove(string_to_array(words, ' '), '')) @@ CAST(%(words)s AS TSQUERY);

-- name: prepare_scan
SELECT
    set_config('statement_timeout', '0', true),
    set_config('enable_hashjoin', 'on', true),
    set_config('enable_mergejoin', 'on', true);

-- name: size
SELECT coalesce(sum(pg_total_relation_size(oid)), 0)::bigint FROM pg_class
WHERE relnamespace = 'postroom'::regnamespace AND relkind = 'r'
    AND relname ~ '^(mailbox|backlog|dead_letters|header|topic|text)_v[0-9]+$';

-- name: at
-- The commit that holds the next position, if it is there.
SELECT at FROM (
    SELECT at, last FROM postroom.log
    WHERE place > (SELECT id << 40 FROM postroom.mailbox_names WHERE name = %(mailbox)s)
        AND place <= (SELECT id << 40 FROM postroom.mailbox_names WHERE name = %(mailbox)s) + %(position)s + 1
    ORDER BY place DESC LIMIT 1
) AS next WHERE last > %(position)s;

-- name: is_locked
SELECT EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND objsubid = 1
        AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
        AND (classid::bigint << 32 | objid::bigint) = hashtextextended(%(lock)s, 0)
);

-- name: commits
-- The commits that may hold places.
SELECT place, last, events, envelopes FROM postroom.log
WHERE place IN (
    SELECT (SELECT max(place) FROM postroom.log WHERE place <= value) FROM unnest(%(places)s::bigint[]) AS value
) ORDER BY place;
