-- Statements of rebuilds in PostgreSQL; `{}` is a table of one version.

-- name: configure
SELECT
    set_config('lock_timeout', '2s', false),
    set_config('statement_timeout', '0', false),
    set_config('idle_session_timeout', '0', false),
    set_config('maintenance_work_mem', '256MB', false),
    -- Two connections build indexes, each on one core.
    set_config('max_parallel_maintenance_workers', '0', false),
    -- Commits become durable in order, so a flip never precedes its rows; what a crash undoes is rebuilt.
    set_config('synchronous_commit', 'off', false),
    -- The server stops building an index when the rebuild is killed.
    set_config('client_connection_check_interval', '1s', false);

-- name: wait_for_locks
SET lock_timeout = 0;

-- name: wait_in_transaction
-- A follower locks its version for a batch, and queries lock the view.
SET LOCAL lock_timeout = '{ms}ms';

-- name: configure_writer
SELECT
    set_config('application_name', 'postroom, writing read models', false),
    set_config('statement_timeout', '0', false),
    set_config('synchronous_commit', 'off', false);

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
