-- Topics and text indexes, built after the load.

INSERT INTO topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM mailbox_v{version} GROUP BY topic;

INSERT INTO text_index_v{version} (rowid, text) SELECT id, text FROM text_v{version};

INSERT INTO word_index_v{version} (rowid, words) SELECT id, words FROM text_v{version};
