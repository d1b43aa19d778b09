-- How a rebuild keeps versions of the read models in PostgreSQL; `{}` is a table of one version.

-- name: configure
SELECT
    set_config('lock_timeout', '2s', false),
    set_config('statement_timeout', '0', false),
    set_config('idle_session_timeout', '0', false),
    set_config('maintenance_work_mem', '256MB', false),
    -- A flip is never durable before what it flips to, and what a crash takes back is only built again.
    set_config('synchronous_commit', 'off', false),
    -- A rebuild that was killed does not go on building an index.
    set_config('client_connection_check_interval', '1s', false);

-- name: lock
SELECT pg_advisory_lock(hashtextextended('postroom rebuild', 0));

-- name: builder
SELECT owner FROM postroom.projection WHERE status = 'building' ORDER BY version DESC LIMIT 1;

-- name: begin
INSERT INTO postroom.projection (status, owner, started_at, cuts)
VALUES ('building', %(owner)s, %(now)s, %(cuts)s) RETURNING version;

-- name: copy
COPY {} ({}) FROM STDIN (FORMAT BINARY);

-- name: remove
DELETE FROM {} WHERE id >= %(before)s AND id < %(after)s;

-- name: retire
UPDATE postroom.projection SET status = 'retired' WHERE status = 'active';

-- name: activate
UPDATE postroom.projection
SET status = 'active', finished_at = %(now)s, counts = %(counts)s, seconds = %(seconds)s
WHERE version = %(version)s;

-- name: reactivate
UPDATE postroom.projection SET status = 'active' WHERE version = %(version)s;

-- name: newest_retired
SELECT max(version) FROM postroom.projection WHERE status = 'retired';

-- name: retired
SELECT version FROM postroom.projection WHERE status = 'retired' ORDER BY finished_at DESC, version DESC;

-- name: building
SELECT version FROM postroom.projection WHERE status = 'building';

-- name: drop
DROP TABLE IF EXISTS {};

-- name: dropped
UPDATE postroom.projection SET status = %(status)s, error = %(error)s WHERE version = %(version)s;
