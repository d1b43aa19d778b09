-- Read models in ClickHouse; {table} is the name of a table with its database, and {columns} are made from its projection.

-- RFC-037's `mailbox` table: a topic's messages lie together by time, and a month's can be dropped together.
-- name: create_mailbox
CREATE TABLE {table} ({columns}) ENGINE = MergeTree
PARTITION BY toYYYYMM(fromUnixTimestamp64Milli(timestamp, 'UTC')) ORDER BY (topic, timestamp, id);

-- name: create
CREATE TABLE {table} ({columns}) ENGINE = MergeTree ORDER BY ({key});

-- What readers see of a model.
-- name: publish
CREATE OR REPLACE VIEW {view} AS SELECT * FROM {table};

-- name: drop
DROP TABLE IF EXISTS {table};

-- name: count
SELECT count() FROM {table};

-- name: read
SELECT {columns} FROM {table} ORDER BY {key};

-- name: tables
SELECT name FROM system.tables WHERE database = {database:String};

-- ClickHouse has no transactions: the catalog is one small file of SQLite, of which the newest revision counts.
-- name: create_catalog
CREATE TABLE IF NOT EXISTS {table} (revision UInt64, image String)
ENGINE = ReplacingMergeTree(revision) ORDER BY tuple();

-- name: read_catalog
SELECT revision, image FROM {table} ORDER BY revision DESC LIMIT 1;
