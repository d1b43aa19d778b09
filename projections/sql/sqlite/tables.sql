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

-- Custom headers by name and value, in the order of search results.
CREATE TABLE header_v{version} (
    name      TEXT NOT NULL,
    value     TEXT NOT NULL,
    timestamp INTEGER NOT NULL,
    id        INTEGER NOT NULL,
    PRIMARY KEY (name, value, timestamp, id)
) STRICT, WITHOUT ROWID;

-- Every topic there is: globs are matched against these few, not against messages.
CREATE TABLE topic_v{version} (
    topic           TEXT PRIMARY KEY,
    messages        INTEGER NOT NULL,
    first_timestamp INTEGER NOT NULL,
    last_timestamp  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What free text is searched in, and its index of three-letter pieces: any part of a word is found, as in an id.
CREATE TABLE text_v{version} (
    id   INTEGER PRIMARY KEY,
    text TEXT NOT NULL
) STRICT;

CREATE VIRTUAL TABLE text_index_v{version} USING fts5 (
    text,
    content = 'text_v{version}', content_rowid = 'id', detail = none, columnsize = 0, tokenize = 'trigram case_sensitive 1'
);
