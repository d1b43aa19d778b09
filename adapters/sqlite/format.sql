-- The format of a SQLite store.

-- name: tables
-- Whether there is a log, of commits or of records, and whether its format is recorded.
SELECT
    (SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'mailbox_names'),
    (SELECT count(*) FROM pragma_table_info('log') WHERE name = 'state'),
    (SELECT count(*) FROM sqlite_schema WHERE type = 'table' AND name = 'store_format');

-- name: format
SELECT format, version FROM store_format;

-- name: record
INSERT INTO store_format (id, format, version) VALUES (1, :format, :version)
ON CONFLICT (id) DO UPDATE SET format = excluded.format, version = excluded.version
WHERE excluded.format > store_format.format;

-- name: copy
VACUUM INTO :path;
