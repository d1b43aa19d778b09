-- Statements of rebuilds in PostgreSQL; `{}` is a table of one version.

-- name: wait_in_transaction
-- A follower locks its version for a batch, and queries lock the view.
SET LOCAL lock_timeout = '{ms}ms';

-- name: lock
SELECT pg_advisory_lock(hashtextextended('postroom rebuild', 0));

-- name: tables
SELECT relname FROM pg_class
WHERE relnamespace = 'postroom'::regnamespace AND relkind IN ('r', 'p') AND NOT relispartition;

-- name: drop
DROP TABLE IF EXISTS {};

-- name: remove
DELETE FROM {} WHERE id >= %(before)s AND id < %(after)s;

-- name: count
SELECT count(*) FROM {};

-- name: is_empty
SELECT NOT EXISTS (SELECT FROM {});

-- name: park
INSERT INTO postroom.projection_parked (version, place, mailbox, position, type, error, parked_at)
VALUES ($1, $2, $3, $4, $5, $6, $7) ON CONFLICT DO NOTHING;

-- name: enable_autovacuum
ALTER TABLE {} RESET (autovacuum_enabled);
