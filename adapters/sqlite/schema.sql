-- The event log of every mailbox in this file. Rows are inserted, never updated; retention deletes ranges.

-- `removed_through` is the last position that retention removed; appends up to it are rejected.
CREATE TABLE IF NOT EXISTS mailbox_names (
    id              INTEGER PRIMARY KEY,
    name            TEXT NOT NULL UNIQUE,
    removed_through INTEGER NOT NULL DEFAULT 0
) STRICT;

-- `place` is mailbox id * 2^40 + position: one integer key clusters the records of a mailbox in order.
CREATE TABLE IF NOT EXISTS log (
    place          INTEGER PRIMARY KEY,
    stream         BLOB NOT NULL,
    version        INTEGER NOT NULL,
    epoch          INTEGER NOT NULL,
    type           TEXT NOT NULL,
    at             INTEGER NOT NULL,
    topic          TEXT,
    shard          INTEGER,
    attempt        INTEGER,
    due            INTEGER,
    reason         TEXT,
    state          BLOB NOT NULL,
    chain          BLOB NOT NULL,
    timestamp      INTEGER,
    message_id     TEXT,
    content_type   TEXT,
    schema_url     TEXT,
    schema_version TEXT,
    encryption     TEXT,
    correlation_id TEXT,
    principal      TEXT,
    namespace      TEXT,
    trace_id       TEXT,
    span_id        TEXT,
    custom_headers TEXT,
    envelope       BLOB
) STRICT;

-- `place >> 40` is the mailbox: several mailboxes may have the same sender's id.
CREATE UNIQUE INDEX IF NOT EXISTS log_stream ON log (stream, version, place >> 40);

CREATE TABLE IF NOT EXISTS snapshot (
    place INTEGER PRIMARY KEY,
    chain BLOB NOT NULL,
    state BLOB NOT NULL
) STRICT;

-- The end of each mailbox's log when its last owner closed it.
CREATE TABLE IF NOT EXISTS seal (
    base     INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,
    chain    BLOB NOT NULL
) STRICT;
