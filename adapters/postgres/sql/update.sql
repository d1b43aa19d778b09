-- Updates specific to PostgreSQL.

-- name: try_lock
SELECT pg_try_advisory_lock(hashtextextended(%s, 0));

-- name: unlock
SELECT pg_advisory_unlock_all();
