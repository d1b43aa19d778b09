-- Read models in ClickHouse; {table} is qualified with its database, and {columns} are those of its projection.

-- RFC-037's `mailbox` table: messages are sorted by topic and time, and partitioned by month.
-- name: create_mailbox
CREATE TABLE {table} ({columns}) ENGINE = MergeTree
PARTITION BY toYYYYMM(fromUnixTimestamp64Milli(timestamp, 'UTC')) ORDER BY (topic, timestamp, id);

-- name: create
CREATE TABLE {table} ({columns}) ENGINE = MergeTree ORDER BY ({key});

-- The view of a model that readers use.
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

-- ClickHouse has no transactions: the catalog is a small SQLite file, stored whole; the newest revision is current.
-- name: create_catalog
CREATE TABLE IF NOT EXISTS {table} (revision UInt64, image String)
ENGINE = ReplacingMergeTree(revision) ORDER BY tuple();

-- name: read_catalog
SELECT revision, image FROM {table} ORDER BY revision DESC LIMIT 1;
