-- Updates specific to SQLite: removing texts from its external-content FTS5 indexes.

-- name: unindex_text
INSERT INTO text_index_v{version} (text_index_v{version}, rowid, text)
SELECT 'delete', id, text FROM text_v{version} WHERE id IN (SELECT id FROM ({rows}));

-- name: unindex_words
INSERT INTO word_index_v{version} (word_index_v{version}, rowid, words)
SELECT 'delete', id, words FROM text_v{version} WHERE id IN (SELECT id FROM ({rows}));
