-- What messages of one version are searched by, before the load (see `postroom.projections.search_text`).

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

-- What parts of text are searched in, and words: each word between blanks.
CREATE TABLE text_v{version} (
    id    INTEGER PRIMARY KEY,
    text  TEXT NOT NULL,
    words TEXT NOT NULL
) STRICT;

-- Of three-letter pieces: any part of a text is found, as in an id.
CREATE VIRTUAL TABLE text_index_v{version} USING fts5 (
    text,
    content = 'text_v{version}', content_rowid = 'id', detail = none, columnsize = 0, tokenize = 'trigram case_sensitive 1'
);

-- What a word is was decided when it was written: this tokenizer splits at blanks and changes nothing.
CREATE VIRTUAL TABLE word_index_v{version} USING fts5 (
    words,
    content = 'text_v{version}', content_rowid = 'id', detail = none, columnsize = 0, tokenize = "ascii tokenchars '_'"
);
