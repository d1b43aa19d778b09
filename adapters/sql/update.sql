-- Statements that apply a batch to the tables of a version. `{rows}` are the input rows, with the alias `source`;
-- `{values}` are the same rows, where they are all that is inserted; the other names in braces are tables.

-- name: active
-- Versions whose tables have the format of an earlier release have no models, as if it had not recorded them.
SELECT version, status, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN models END, plan FROM {projection} WHERE status = 'active';

-- name: version
SELECT version, status, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN models END, plan FROM {projection} WHERE version = {version};

-- name: lock_version
SELECT status FROM {projection} WHERE version = {version}{lock};

-- name: cursors
SELECT mailbox_id, position, at, chain, mailbox FROM {projection_cursor} WHERE version = {version};

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT id, name FROM {mailbox_names} WHERE replace(name, '@', '') <> name ORDER BY id;

-- name: head
-- With the chain hash and log time of the commit that holds the position of the cursor.
SELECT {id}, (SELECT removed_through FROM {mailbox_names} WHERE id = {id}),
    (SELECT last FROM {log} WHERE place > {base} AND place < {end} ORDER BY place DESC LIMIT 1), chain, at
FROM (SELECT 1) AS one LEFT JOIN (
    SELECT last, chain, at FROM {log} WHERE place > {base} AND place <= {place} ORDER BY place DESC LIMIT 1
) AS held ON last >= {position};

-- name: begin_cursors
INSERT INTO {projection_cursor} (version, mailbox_id, mailbox, position, at)
SELECT version, mailbox_id, mailbox, 0, 0 FROM ({rows}) AS source WHERE true
ON CONFLICT (version, mailbox_id) DO NOTHING;

-- name: move_cursors
UPDATE {projection_cursor} AS moved SET position = source.position, at = source.at, chain = source.chain
FROM ({rows}) AS source
WHERE moved.version = source.version AND moved.mailbox_id = source.mailbox_id AND moved.position = source.expected
RETURNING 1;

-- name: stored
SELECT {columns} FROM ({rows}) AS source
JOIN {mailbox} AS message ON message.stream = source.stream AND message.mailbox = source.mailbox;

-- name: due
SELECT {columns} FROM ({rows}) AS source
JOIN {mailbox} AS message ON message.mailbox = source.mailbox AND message.due <= source.now
WHERE message.status = 'delayed';

-- name: insert
INSERT INTO {table} ({columns}) {values};

-- name: merge
INSERT INTO {table} AS merged ({columns}) {values}
ON CONFLICT ({key}) DO UPDATE SET {assignments};

-- name: add_names
INSERT INTO {table} (name) {values} ON CONFLICT DO NOTHING;

-- name: change
UPDATE {mailbox} AS message
SET status = source.status, attempts = source.attempts, redriven = source.redriven, changed_at = source.changed_at,
    due = source.due, dead_letterings = source.dead_letterings
FROM ({rows}) AS source
WHERE message.id = source.id;

-- name: delete
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM ({rows}) AS source);

-- name: delete_empty
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM ({rows}) AS source) AND {is_empty};

-- name: unsettled
SELECT {columns} FROM ({rows}) AS source JOIN {mailbox} AS message ON {condition}
WHERE message.status IN ('ready', 'delayed', 'in_flight', 'dead');

-- name: oldest
UPDATE {backlog} AS shard
SET oldest_at = (
    SELECT min(message.created_at) FROM {mailbox} AS message
    WHERE message.mailbox = source.mailbox AND message.topic = source.topic AND message.shard = source.shard
        -- SQLite uses a partial index only if its condition is repeated exactly; the second term excludes dead letters.
        AND message.status IN ('ready', 'delayed', 'in_flight', 'dead') AND message.status <> 'dead'
)
FROM ({rows}) AS source
WHERE shard.mailbox = source.mailbox AND shard.topic = source.topic AND shard.shard = source.shard;

-- name: park
INSERT INTO {projection_parked} (version, place, mailbox, position, type, error, parked_at)
SELECT version, place, mailbox, position, type, error, parked_at FROM ({rows}) AS source WHERE true
ON CONFLICT (version, place) DO NOTHING;

-- name: removed
SELECT {columns} FROM {mailbox} AS message WHERE message.id >= {before} AND message.id < {after};

-- name: recount
UPDATE {table} AS counted SET
    messages = counted.messages - source.messages,
    first_timestamp = coalesce(
        (SELECT min(message.timestamp) FROM {mailbox} AS message WHERE message.topic = source.topic), 0
    ),
    last_timestamp = coalesce(
        (SELECT max(message.timestamp) FROM {mailbox} AS message WHERE message.topic = source.topic), 0
    )
FROM ({rows}) AS source
WHERE counted.topic = source.topic;
