-- The tables of messages and for searching them, created before the load (see `postroom.projections.search_text`).

CREATE TABLE mailbox_v{version} (
    id              INTEGER PRIMARY KEY,
    -- NULL if it is the stream id as a UUID.
    message_id      TEXT,
    timestamp       INTEGER NOT NULL,
    topic           TEXT NOT NULL,
    content_type    TEXT,
    schema_url      TEXT,
    schema_version  TEXT,
    encryption      TEXT,
    correlation_id  TEXT,
    principal       TEXT,
    namespace       TEXT,
    trace_id        TEXT,
    span_id         TEXT,
    custom_headers  TEXT,
    created_at      INTEGER NOT NULL,
    mailbox         TEXT NOT NULL,
    position        INTEGER NOT NULL,
    shard           INTEGER NOT NULL,
    status          TEXT NOT NULL,
    attempts        INTEGER NOT NULL,
    redriven        INTEGER NOT NULL,
    changed_at      INTEGER NOT NULL,
    due             INTEGER,
    dead_letterings TEXT,
    stream          BLOB NOT NULL,
    -- The searchable text if it is not just the headers with ASCII letters in lower case.
    text            TEXT
) STRICT;

-- The names of custom headers.
CREATE TABLE header_v{version} (
    name TEXT PRIMARY KEY
) STRICT, WITHOUT ROWID;

-- All topics, against which globs are matched.
CREATE TABLE topic_v{version} (
    topic           TEXT PRIMARY KEY,
    messages        INTEGER NOT NULL,
    first_timestamp INTEGER NOT NULL,
    last_timestamp  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The words of messages whose bodies are searched: retention removes the envelopes that they are from.
CREATE TABLE text_v{version} (
    id    INTEGER PRIMARY KEY,
    words TEXT NOT NULL
) STRICT;

-- A trigram index, for searching any part of the text. The indexes have no copy of what they index.
CREATE VIRTUAL TABLE text_index_v{version} USING fts5 (
    text, content = '', detail = none, columnsize = 0, tokenize = 'trigram case_sensitive 1'
);

-- Words were normalized when they were written: this tokenizer only splits at blanks.
CREATE VIRTUAL TABLE word_index_v{version} USING fts5 (
    words, content = '', detail = none, columnsize = 0, tokenize = "ascii tokenchars '_'"
);
