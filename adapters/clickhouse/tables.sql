-- Read models in ClickHouse; names in braces are tables qualified with their database, or lists of columns.
--
-- Rows are never changed: a change inserts the new row with the revision `since`, and ends the old one in
-- `{table}_ended` with the revision `until`. A revision is visible when a row of the cursor table has it (ADR 0094).

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
CREATE TABLE {table} ({columns}, since UInt64, until UInt64, at DateTime DEFAULT now()) ENGINE = MergeTree
ORDER BY until;

-- name: create_cursor
CREATE TABLE IF NOT EXISTS {table} (
    version UInt64, mailbox_id Int64, mailbox String, position Int64, at Int64, revision UInt64
) ENGINE = ReplacingMergeTree(revision) ORDER BY (version, mailbox_id);

-- name: live
-- The rows of a revision.
SELECT {columns} FROM {table}
WHERE since <= {revision} AND ({key}, since) NOT IN (SELECT {key}, since FROM {ended} WHERE until <= {revision})

-- name: revision
(SELECT coalesce(max(revision), 0) FROM {cursor})

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
SELECT version, mailbox_id, mailbox, position, at, revision FROM {table} ORDER BY revision DESC LIMIT 1 BY version, mailbox_id;

-- name: advance_cursor
-- The follower's cursors are newer than the catalog's.
INSERT INTO projection_cursor (version, mailbox_id, mailbox, position, at) VALUES (?, ?, ?, ?, ?)
ON CONFLICT (version, mailbox_id) DO UPDATE
SET position = max(position, excluded.position), at = max(at, excluded.at);
