-- What search needs beside the indexes of messages, built after the load, one statement at a time.

INSERT INTO topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM mailbox_v{version} GROUP BY topic;

INSERT INTO text_index_v{version} (rowid, text) SELECT id, text FROM text_v{version};

INSERT INTO word_index_v{version} (rowid, words) SELECT id, words FROM text_v{version};

-- From here on the indexes follow their text by themselves. What a message is searched by never changes.
CREATE TRIGGER text_v{version}_inserted AFTER INSERT ON text_v{version} BEGIN
    INSERT INTO text_index_v{version} (rowid, text) VALUES (new.id, new.text);
    INSERT INTO word_index_v{version} (rowid, words) VALUES (new.id, new.words);
END;

CREATE TRIGGER text_v{version}_deleted AFTER DELETE ON text_v{version} BEGIN
    INSERT INTO text_index_v{version} (text_index_v{version}, rowid, text) VALUES ('delete', old.id, old.text);
    INSERT INTO word_index_v{version} (word_index_v{version}, rowid, words) VALUES ('delete', old.id, old.words);
END;
