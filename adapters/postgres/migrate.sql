-- Bookkeeping of migrations; `{table}` is `postroom_migrations`, in the schema of the set.

-- name: lock
SELECT pg_advisory_xact_lock(hashtextextended('postroom migrate', 0));

-- name: find_table
-- Locking a table lets the session see one that another has created since it looked last, also in a transaction.
SELECT to_regclass(%(table)s) FROM pg_class LIMIT 1;

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS {schema};

-- name: create_table
CREATE TABLE IF NOT EXISTS {table} (
    set        TEXT NOT NULL,
    number     INT NOT NULL,
    name       TEXT NOT NULL,
    checksum   TEXT NOT NULL,
    applied_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    PRIMARY KEY (set, number)
);

-- name: applied
SELECT number, name, checksum FROM {table} WHERE set = %(set)s ORDER BY number;

-- name: format
SELECT number, name FROM {table} WHERE set = 'format' ORDER BY number DESC LIMIT 1;

-- name: record
INSERT INTO {table} (set, number, name, checksum) VALUES (%(set)s, %(number)s, %(name)s, %(checksum)s);
