-- How batches are brought into the tables of a version. `{rows}` are the rows that are handed over, as `given`; the other
-- names in braces are tables.

-- name: active
SELECT version, status, models, plan FROM {projection} WHERE status = 'active';

-- name: version
SELECT version, status, models, plan FROM {projection} WHERE version = {version};

-- name: hold
SELECT status FROM {projection} WHERE version = {version}{lock};

-- name: cursors
SELECT mailbox_id, position, at FROM {projection_cursor} WHERE version = {version};

-- name: mailboxes
SELECT id, name, removed_through FROM {mailbox_names} ORDER BY id;

-- name: head
SELECT {id}, (SELECT place FROM {log} WHERE place > {covered} AND place < {end} ORDER BY place DESC LIMIT 1);

-- name: records
SELECT {columns} FROM {log} WHERE place BETWEEN {first} AND {last} ORDER BY place;

-- name: begin_cursors
INSERT INTO {projection_cursor} (version, mailbox_id, mailbox, position, at)
SELECT version, mailbox_id, mailbox, 0, 0 FROM ({rows}) AS given WHERE true
ON CONFLICT (version, mailbox_id) DO NOTHING;

-- name: move_cursors
UPDATE {projection_cursor} AS moved SET position = given.position, at = given.at
FROM ({rows}) AS given
WHERE moved.version = given.version AND moved.mailbox_id = given.mailbox_id AND moved.position = given.expected
RETURNING 1;

-- name: known
SELECT {columns} FROM ({rows}) AS given
JOIN {mailbox} AS message ON message.stream = given.stream AND message.mailbox = given.mailbox;

-- name: due
SELECT {columns} FROM ({rows}) AS given
JOIN {mailbox} AS message ON message.mailbox = given.mailbox AND message.due <= given.now
WHERE message.status = 'delayed';

-- name: insert
INSERT INTO {table} ({columns}) SELECT {columns} FROM ({rows}) AS given WHERE true;

-- name: merge
INSERT INTO {table} AS merged ({columns}) SELECT {columns} FROM ({rows}) AS given WHERE true
ON CONFLICT ({key}) DO UPDATE SET {merged};

-- name: change
UPDATE {mailbox} AS message
SET status = given.status, attempts = given.attempts, redriven = given.redriven, changed_at = given.changed_at,
    due = given.due, deaths = given.deaths
FROM ({rows}) AS given
WHERE message.id = given.id;

-- name: delete
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM ({rows}) AS given);

-- name: delete_nothing_left
DELETE FROM {table} WHERE ({key}) IN (SELECT {key} FROM ({rows}) AS given) AND {is_nothing_left};

-- name: unsettled
SELECT {columns} FROM ({rows}) AS given JOIN {mailbox} AS message ON {is_given}
WHERE message.status IN ('ready', 'delayed', 'in_flight', 'dead');

-- name: oldest
UPDATE {backlog} AS shard
SET oldest_at = (
    SELECT min(message.created_at) FROM {mailbox} AS message
    WHERE message.mailbox = given.mailbox AND message.topic = given.topic AND message.shard = given.shard
        -- Word for word as its index has it, by which alone SQLite knows the index; then those that are not dead.
        AND message.status IN ('ready', 'delayed', 'in_flight', 'dead') AND message.status <> 'dead'
)
FROM ({rows}) AS given
WHERE shard.mailbox = given.mailbox AND shard.topic = given.topic AND shard.shard = given.shard;

-- name: park
INSERT INTO {projection_parked} (version, place, mailbox, position, type, error, parked_at)
SELECT version, place, mailbox, position, type, error, parked_at FROM ({rows}) AS given WHERE true
ON CONFLICT (version, place) DO NOTHING;

-- name: removed
SELECT {columns} FROM {mailbox} AS message WHERE message.id >= {before} AND message.id < {after};

-- name: recount
UPDATE {table} AS counted SET
    messages = counted.messages - given.messages,
    first_timestamp = coalesce(
        (SELECT min(message.timestamp) FROM {mailbox} AS message WHERE message.topic = given.topic), 0
    ),
    last_timestamp = coalesce(
        (SELECT max(message.timestamp) FROM {mailbox} AS message WHERE message.topic = given.topic), 0
    )
FROM ({rows}) AS given
WHERE counted.topic = given.topic;
