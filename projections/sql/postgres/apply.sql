-- What applying batches takes in PostgreSQL only.

-- name: configure
SELECT
    set_config('application_name', 'postroom project follow', false),
    set_config('lock_timeout', '10s', false),
    set_config('idle_in_transaction_session_timeout', '60s', false),
    -- What a crash takes back is applied again: the cursor goes back with its rows.
    set_config('synchronous_commit', 'off', false),
    -- Whatever the statistics say, what is looked up by a key has its index.
    set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false);

-- name: lead
SELECT pg_try_advisory_lock(hashtextextended('postroom follow', 0));

-- name: end_leading
SELECT pg_advisory_unlock_all();
