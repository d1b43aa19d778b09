-- Updates specific to SQLite: removing texts from its contentless FTS5 indexes, by the same text.

-- name: unindex_text
INSERT INTO text_index_v{version} (text_index_v{version}, rowid, text) SELECT 'delete', id, text FROM ({rows});

-- name: unindex_words
-- Without its envelope, the words of a message lack the words of its body.
INSERT INTO word_index_v{version} (word_index_v{version}, rowid, words)
SELECT 'delete', source.id, source.words || coalesce(body.words, '')
FROM ({rows}) AS source LEFT JOIN text_v{version} AS body ON body.id = source.id;
