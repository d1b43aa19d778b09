-- The tables of one version, before the load; {version} is its number. The column comments are in projections/rows.py.

-- RFC-037's `mailbox` table. The envelope stands last, so that reading a header never walks over it.
CREATE TABLE mailbox_v{version} (
    id             INTEGER PRIMARY KEY,
    message_id     TEXT NOT NULL,
    timestamp      INTEGER NOT NULL,
    topic          TEXT NOT NULL,
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
    created_at     INTEGER NOT NULL,
    mailbox        TEXT NOT NULL,
    position       INTEGER NOT NULL,
    shard          INTEGER NOT NULL,
    status         TEXT NOT NULL,
    attempts       INTEGER NOT NULL,
    redriven       INTEGER NOT NULL,
    changed_at     INTEGER NOT NULL,
    envelope_blob  BLOB NOT NULL
) STRICT;

CREATE TABLE backlog_v{version} (
    mailbox   TEXT NOT NULL,
    topic     TEXT NOT NULL,
    shard     INTEGER NOT NULL,
    ready     INTEGER NOT NULL,
    in_flight INTEGER NOT NULL,
    delayed   INTEGER NOT NULL,
    dead      INTEGER NOT NULL,
    oldest_at INTEGER,
    PRIMARY KEY (mailbox, topic, shard)
) STRICT, WITHOUT ROWID;

CREATE TABLE dead_letters_v{version} (
    id          INTEGER PRIMARY KEY,
    mailbox     TEXT NOT NULL,
    topic       TEXT NOT NULL,
    shard       INTEGER NOT NULL,
    message_id  TEXT NOT NULL,
    reason      TEXT NOT NULL,
    attempt     INTEGER NOT NULL,
    last_error  TEXT,
    fingerprint TEXT NOT NULL,
    first_seen  INTEGER NOT NULL,
    last_seen   INTEGER NOT NULL,
    redriven    INTEGER NOT NULL,
    redriven_at INTEGER
) STRICT;
