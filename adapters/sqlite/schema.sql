-- The event log of every mailbox in this file. Rows are only ever inserted, until retention removes whole ranges.

-- `removed_through` is the last position that retention removed: nobody may append there again.
CREATE TABLE IF NOT EXISTS mailbox_names (
    id              INTEGER PRIMARY KEY,
    name            TEXT NOT NULL UNIQUE,
    removed_through INTEGER NOT NULL DEFAULT 0
) STRICT;

-- `place` is mailbox id * 2^40 + position: one integer key keeps each mailbox's records together and in order.
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

-- `place >> 40` is the mailbox: an id that a sender chose may be in several.
CREATE UNIQUE INDEX IF NOT EXISTS log_stream ON log (stream, version, place >> 40);

CREATE TABLE IF NOT EXISTS snapshot (
    place INTEGER PRIMARY KEY,
    chain BLOB NOT NULL,
    state BLOB NOT NULL
) STRICT;

-- Where each mailbox's log ended when its owner last left.
CREATE TABLE IF NOT EXISTS seal (
    base     INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,
    chain    BLOB NOT NULL
) STRICT;
