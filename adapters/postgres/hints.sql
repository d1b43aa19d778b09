-- Notifications of committed rows (ADR 0138). 100 is the key of the lock by which who writes to a table knows that a
-- session waits; of several that do, one needs to hold it. A session that still holds it does not take it again, because
-- it would have to release it twice.

-- name: watch
SELECT (SELECT nspname::text FROM pg_namespace WHERE oid = relnamespace),
    CASE WHEN %(trigger)s::text IS NULL OR EXISTS (
        SELECT FROM pg_trigger WHERE tgrelid = pg_class.oid AND tgname = %(trigger)s AND tgenabled IN ('O', 'A')
    ) THEN CASE WHEN EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND classid = pg_class.oid AND objid = 100 AND objsubid = 2
            AND mode = 'ExclusiveLock' AND granted
            AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    ) THEN true ELSE pg_try_advisory_lock(pg_class.oid::int, 100) END END
FROM pg_class WHERE oid = to_regclass(%(table)s);

-- Sessions that have found the lock taken are notified, as they rely on it. They don't hold it themselves, and to release
-- it all the same would be a warning in the server's log.
-- name: unwatch
SELECT CASE WHEN EXISTS (
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND classid = pg_class.oid AND objid = 100 AND objsubid = 2
        AND mode = 'ExclusiveLock' AND granted AND pid = pg_backend_pid()
) THEN CASE WHEN pg_advisory_unlock(oid::int, 100) THEN pg_notify(%(channel)s, %(schema)s)::text END END
FROM pg_class WHERE oid = to_regclass(%(table)s);
