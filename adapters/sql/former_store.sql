-- Reading stores of the format before commits; `{schema}` is the prefix of their tables.

-- name: mailboxes
SELECT id, name FROM {schema}mailbox_names;

-- name: last
SELECT max(place) - {base} FROM {schema}log WHERE place > {base} AND place < {top};

-- name: records
SELECT place - {base}, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain,
    timestamp, message_id, content_type, schema_url, schema_version, encryption, correlation_id, principal,
    namespace, trace_id, span_id, custom_headers, envelope
FROM {schema}log WHERE place > {base} AND place < {top} ORDER BY place;

-- name: seal
SELECT position FROM {schema}seal WHERE base = {base};

-- name: recorded_messages
SELECT id, mailbox, topic, message, error FROM outbox_messages ORDER BY position;

-- name: sqlite_columns
SELECT name FROM pragma_table_info('log');

-- name: sqlite_has_outbox
SELECT count(*) FROM sqlite_schema WHERE name = 'outbox_messages';

-- name: postgres_snapshot
SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY;

-- name: postgres_columns
SELECT column_name FROM information_schema.columns WHERE table_schema = 'postroom' AND table_name = 'log';

-- name: postgres_has_outbox
SELECT count(to_regclass('outbox_messages'));
