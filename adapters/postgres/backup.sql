-- Backing up and restoring PostgreSQL stores; `base` is the place before a mailbox's first position.

-- name: configure
SELECT set_config('statement_timeout', '0', true), set_config('lock_timeout', '5s', true),
    set_config('idle_in_transaction_session_timeout', '0', true);

-- Before the snapshot is taken, so that retention drops no partition that the snapshot shows.
-- name: lock
LOCK TABLE postroom.log, postroom.log_index, postroom.mailbox_names, postroom.snapshot, postroom.seal
IN ACCESS SHARE MODE;

-- name: mailboxes
SELECT id, name FROM postroom.mailbox_names ORDER BY name COLLATE "C";

-- name: head
SELECT last, at, chain, epoch FROM postroom.log
WHERE place > %(base)s AND place <= %(top)s ORDER BY place DESC LIMIT 1;

-- name: first
SELECT place - %(base)s FROM postroom.log
WHERE place > %(base)s AND place <= %(top)s ORDER BY place LIMIT 1;

-- name: copy_commits
COPY (
    SELECT place - {base}, last, epoch, at, chain, events, envelopes
    FROM postroom.log WHERE place > {base} AND place <= {top} ORDER BY place
) TO STDOUT (FORMAT BINARY);

-- name: copy_entries
COPY (
    SELECT uuid_send(stream), version, place - {base}, CASE WHEN version = 1 AND last > place THEN last - {base} END
    FROM postroom.log_index LEFT JOIN (
        SELECT stream, max(place) AS last FROM postroom.log_index
        WHERE version IS NULL AND place > {base} AND place <= {top} GROUP BY stream
    ) AS last_events USING (stream)
    WHERE version IS NOT NULL AND place > {base} AND place <= {top}
) TO STDOUT (FORMAT BINARY);

-- name: snapshots
SELECT place - %(base)s, chain, state FROM postroom.snapshot
WHERE place > %(base)s AND place <= %(top)s ORDER BY place DESC;

-- name: seal
SELECT position, chain FROM postroom.seal WHERE base = %(base)s;

-- name: find_table
SELECT to_regclass(%(table)s) IS NOT NULL;

-- name: recorded_messages
SELECT id, mailbox, topic, message, error FROM outbox_messages ORDER BY position;

-- name: has_rows
SELECT EXISTS (SELECT FROM {table});

-- name: copy_table
COPY {table} TO STDOUT (FORMAT csv, HEADER);

-- name: load_table
COPY {table} ({columns}) FROM STDIN (FORMAT csv, HEADER);

-- name: restart_positions
SELECT setval(pg_get_serial_sequence(%(table)s, 'position'), greatest((SELECT max(position) FROM {table}), 1));

-- Nobody appends until the end, but others may read.
-- name: lock_for_restore
LOCK TABLE postroom.mailbox_names, postroom.log, postroom.log_index IN SHARE ROW EXCLUSIVE MODE;

-- name: add_mailbox
INSERT INTO postroom.mailbox_names (name, partition_positions, removed_through)
VALUES (%(name)s, %(positions)s, %(removed)s) RETURNING id;

-- name: make_partitions
SELECT postroom.make_partitions(%(id)s, %(through)s);

-- name: copy_into_log
COPY postroom.log (place, last, epoch, at, chain, events, envelopes) FROM STDIN (FORMAT BINARY);

-- name: copy_into_index
COPY postroom.log_index (stream, version, place) FROM STDIN (FORMAT BINARY);

-- name: add_snapshot
INSERT INTO postroom.snapshot (place, chain, state) VALUES (%s, %s, %s);

-- name: add_seal
INSERT INTO postroom.seal (base, position, chain) VALUES (%s, %s, %s);

-- name: record_message
INSERT INTO outbox_messages (id, mailbox, topic, message, error) VALUES (%s, %s, %s, %s, %s);

-- The number of the last partition of a mailbox; drop_partitions drops all up to `removed_through`.
-- name: remove_all
UPDATE postroom.mailbox_names AS mailbox SET removed_through = partition_positions * (1 + coalesce((
    SELECT max(split_part(relname, '_', 3)::bigint) FROM pg_class
    WHERE relnamespace = 'postroom'::regnamespace AND relname ~ ('^log_' || mailbox.id || '_[0-9]+$')
), -1)) WHERE id = %(id)s;

-- name: drop_partitions
SELECT postroom.drop_partitions(%(id)s);

-- name: count_commits
SELECT count(*) FROM postroom.log WHERE place > %(base)s AND place <= %(top)s;

-- name: forget_snapshots
DELETE FROM postroom.snapshot WHERE place > %(base)s AND place <= %(top)s;

-- name: forget_seal
DELETE FROM postroom.seal WHERE base = %(base)s;

-- name: forget_mailbox
DELETE FROM postroom.mailbox_names WHERE id = %(id)s;

-- name: retire_read_models
WITH cursors AS (DELETE FROM postroom.projection_cursor),
    parts AS (DELETE FROM postroom.projection_part),
    parked AS (DELETE FROM postroom.projection_parked)
UPDATE postroom.projection SET status = 'dropped' WHERE status IN ('building', 'active', 'retired');
