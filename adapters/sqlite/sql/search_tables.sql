-- The tables for searching one version, created before the load (see `postroom.projections.search_text`).

-- Custom headers by name and value, in the order of search results.
CREATE TABLE header_v{version} (
    name      TEXT NOT NULL,
    value     TEXT NOT NULL,
    timestamp INTEGER NOT NULL,
    id        INTEGER NOT NULL,
    PRIMARY KEY (name, value, timestamp, id)
) STRICT, WITHOUT ROWID;

-- All topics, against which globs are matched.
CREATE TABLE topic_v{version} (
    topic           TEXT PRIMARY KEY,
    messages        INTEGER NOT NULL,
    first_timestamp INTEGER NOT NULL,
    last_timestamp  INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- The searchable text, and its words, each between blanks.
CREATE TABLE text_v{version} (
    id    INTEGER PRIMARY KEY,
    text  TEXT NOT NULL,
    words TEXT NOT NULL
) STRICT;

-- A trigram index, for searching any part of the text, such as part of an id.
CREATE VIRTUAL TABLE text_index_v{version} USING fts5 (
    text,
    content = 'text_v{version}', content_rowid = 'id', detail = none, columnsize = 0, tokenize = 'trigram case_sensitive 1'
);

-- Words were normalized when they were written: this tokenizer only splits at blanks.
CREATE VIRTUAL TABLE word_index_v{version} USING fts5 (
    words,
    content = 'text_v{version}', content_rowid = 'id', detail = none, columnsize = 0, tokenize = "ascii tokenchars '_'"
);
