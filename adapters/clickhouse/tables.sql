-- Read models in ClickHouse; names in braces are tables qualified with their database, or lists of columns.
--
-- Rows are never changed: a change inserts the new row with the revision `since`, and ends the old one in
-- `{table}_ended` with the revision `until` (ADR 0094).

-- name: create_mailbox
-- RFC-037's `mailbox` table: messages are sorted by topic and time, and partitioned by month.
CREATE TABLE {table} (
    {columns}, since UInt64 DEFAULT 0,
    INDEX by_id id TYPE minmax,
    INDEX by_message_id message_id TYPE bloom_filter,
    INDEX by_stream stream TYPE bloom_filter,
    INDEX by_correlation_id correlation_id TYPE bloom_filter,
    INDEX by_trace_id trace_id TYPE bloom_filter
) ENGINE = MergeTree
PARTITION BY toYYYYMM(fromUnixTimestamp64Milli(timestamp, 'UTC')) ORDER BY (topic, timestamp, id);

-- name: create
CREATE TABLE {table} ({columns}, since UInt64 DEFAULT 0) ENGINE = MergeTree ORDER BY ({key});

-- name: create_ended
CREATE TABLE {table} ({columns}, since UInt64, until UInt64) ENGINE = MergeTree ORDER BY until;

-- name: create_cursor
-- The positions of versions, of which the newest row of a mailbox counts; `chain` is the chain hash of the commit with that
-- position, or empty. A revision is visible when it has a row, or
-- up to that of version 0, to which rows were compacted.
CREATE TABLE IF NOT EXISTS {table} (
    version UInt64, mailbox_id Int64, mailbox String, position Int64, at Int64, revision UInt64, chain String
) ENGINE = MergeTree ORDER BY (version, mailbox_id, revision);

-- name: add_chain
-- The table of an earlier release has none.
ALTER TABLE {table} ADD COLUMN IF NOT EXISTS chain String;

-- name: create_parked
CREATE TABLE IF NOT EXISTS {table} (
    version Int64, place Int64, mailbox String, position Int64, type String, error String, parked_at Int64,
    since UInt64
) ENGINE = MergeTree ORDER BY (version, place);

-- name: live
-- The rows that are visible at a revision.
SELECT {columns} FROM {table}
WHERE {since_visible} AND ({key}, since) NOT IN (SELECT {key}, since FROM {ended} WHERE {until_visible})

-- name: visible
({column} <= (SELECT coalesce(max(revision), 0) FROM {cursor} WHERE version = 0)
    OR {column} IN (SELECT revision FROM {cursor} WHERE revision <= {revision}) OR {column} = {own})

-- name: publish
-- The view of a model that readers use.
CREATE OR REPLACE VIEW {view} AS {rows};

-- name: drop
DROP TABLE IF EXISTS {table};

-- name: delete
DELETE FROM {table} WHERE {condition};

-- name: count
SELECT count() FROM ({rows});

-- name: tables
SELECT name FROM system.tables WHERE database = {database:String};

-- name: names
-- For SQLAlchemy, as the next one.
SELECT name FROM system.tables WHERE database = :database

-- name: size
SELECT sum(bytes_on_disk) FROM system.parts WHERE active AND database = :database

-- name: all
SELECT {columns} FROM {table}

-- name: topics
SELECT topic, count() AS messages, min(timestamp) AS first_timestamp, max(timestamp) AS last_timestamp
FROM ({rows}) GROUP BY topic

-- name: create_catalog
-- ClickHouse has no transactions: the catalog is a small SQLite file, stored whole; the newest revision is current.
CREATE TABLE IF NOT EXISTS {table} (revision UInt64, image String)
ENGINE = ReplacingMergeTree(revision) ORDER BY tuple();

-- name: read_catalog
SELECT revision, image FROM {table} ORDER BY revision DESC LIMIT 1;

-- name: read_cursors
-- All columns: the table of an earlier release has no chain.
SELECT * FROM {table} ORDER BY revision DESC LIMIT 1 BY version, mailbox_id;

-- name: read_parked
SELECT version, place, mailbox, position, type, error, parked_at FROM {table} WHERE {visible};

-- name: add_parked
INSERT OR IGNORE INTO projection_parked (version, place, mailbox, position, type, error, parked_at)
VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: advance_cursor
-- The follower's cursors are newer than the catalog's.
INSERT INTO projection_cursor (version, mailbox_id, mailbox, position, at, chain) VALUES (:version, :mailbox_id, :mailbox, :position, :at, :chain)
ON CONFLICT (version, mailbox_id) DO UPDATE
SET position = excluded.position, at = max(at, excluded.at), chain = excluded.chain
WHERE excluded.position >= position;

-- name: stage
-- Rows that the next statements of a batch join.
CREATE OR REPLACE TABLE {table} ({columns}) ENGINE = Memory;

-- name: among
SELECT {columns} FROM ({rows}) WHERE ({key}) IN (SELECT {key} FROM {staged})

-- name: due
SELECT {columns} FROM (SELECT * FROM ({rows}) WHERE status = 'delayed') AS message
INNER JOIN {staged} AS staged ON message.mailbox = staged.mailbox WHERE message.due <= staged.now

-- name: end
INSERT INTO {ended} ({key}, since, until) SELECT {key}, since, {until} FROM ({rows}) WHERE ({key}) IN (SELECT {key} FROM {staged});

-- name: change
INSERT INTO {table} ({names}, since)
SELECT {columns}, {since} FROM (SELECT * FROM ({rows}) WHERE id IN (SELECT id FROM {staged})) AS message
INNER JOIN {staged} AS staged ON message.id = staged.id;

-- name: commit
-- The cursors of a batch, unless another revision became visible after that which the batch continues.
INSERT INTO {cursor} (version, mailbox_id, mailbox, position, at, chain, revision)
SELECT {version}, mailbox_id, mailbox, position, at, chain, {revision} FROM {staged}
WHERE (SELECT coalesce(max(revision), 0) FROM {cursor}) = {before};

-- name: is_committed
SELECT count() > 0 FROM {cursor} WHERE revision = {revision};

-- name: oldest
SELECT {key}, min(created_at) AS oldest_at FROM ({rows})
WHERE status IN ('ready', 'delayed', 'in_flight') AND ({key}) IN (SELECT {key} FROM {staged}) GROUP BY {key}

-- name: unsettled
SELECT {columns} FROM ({rows}) WHERE status IN ('ready', 'delayed', 'in_flight', 'dead') AND {condition}

-- name: compactable
SELECT coalesce(max(revision), 0), count() FROM {cursor} WHERE version > 0 AND revision <= {before};
