-- Updates specific to PostgreSQL.

-- name: configure
SELECT
    set_config('application_name', 'postroom project follow', false),
    set_config('lock_timeout', '10s', false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    -- Batches undone by a crash are applied again, as the cursor is undone with their rows.
    set_config('synchronous_commit', 'off', false),
    -- Lookups by key have an index, whatever the statistics say.
    set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false);

-- name: try_lock
SELECT pg_try_advisory_lock(hashtextextended(%s, 0));

-- name: unlock
SELECT pg_advisory_unlock_all();
