-- The rows of messages that a task of a rebuild stages in a file of its own, attached as `staged`.

-- name: create_search
CREATE TABLE search (id INTEGER PRIMARY KEY, text TEXT NOT NULL, words TEXT NOT NULL) STRICT;

-- name: copy_mailbox
-- The tables have the same definition, so that SQLite copies records without decoding them.
INSERT INTO main.mailbox_v{version} SELECT * FROM staged.mailbox_v{version};

-- name: index_text
INSERT INTO main.text_index_v{version} (rowid, text) SELECT id, text FROM staged.search;

-- name: index_words
INSERT INTO main.word_index_v{version} (rowid, words) SELECT id, words FROM staged.search;
