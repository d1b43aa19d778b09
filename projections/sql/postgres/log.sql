-- How the rebuild reads the PostgreSQL event log.

-- name: configure
SELECT
    set_config('default_transaction_read_only', 'on', false),
    -- New partitions have no statistics yet; a range of places always has its index.
    set_config('enable_seqscan', 'off', false),
    set_config('jit', 'off', false);

-- name: mailboxes
SELECT id, name FROM postroom.mailbox_names ORDER BY id;

-- name: first
SELECT place FROM postroom.log WHERE place > %(base)s AND place < %(top)s ORDER BY place LIMIT 1;

-- name: last
SELECT place, at FROM postroom.log WHERE place > %(base)s AND place < %(top)s ORDER BY place DESC LIMIT 1;
