-- Statements of PostgreSQL ownership.

-- name: try_lock
SELECT pg_try_advisory_lock(hashtextextended('postroom mailbox ' || %(mailbox)s, 0));

-- name: holder
WITH key AS (SELECT hashtextextended('postroom mailbox ' || %(mailbox)s, 0) AS value)
SELECT application_name FROM key, pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND classid::bigint = (value >> 32) & 4294967295 AND objid::bigint = value & 4294967295
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: incumbent
WITH key AS (SELECT hashtextextended('postroom mailbox ' || %(mailbox)s, 0) AS value)
SELECT pid || ' ' || backend_start FROM key, pg_locks JOIN pg_stat_activity USING (pid)
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND classid::bigint = (value >> 32) & 4294967295 AND objid::bigint = value & 4294967295
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database());

-- name: evict
SELECT pg_terminate_backend(pid, %(wait_ms)s) FROM pg_stat_activity
WHERE pid || ' ' || backend_start = %(incumbent)s;

-- A pid may be reused, but not by another process with the owner's name.
-- name: end_session
SELECT pg_terminate_backend(pid, %(wait_ms)s) FROM pg_stat_activity
WHERE pid = %(pid)s AND application_name = current_setting('application_name');

-- name: unlock
SELECT pg_advisory_unlock_all();

-- name: ping
SELECT 1;
