-- What search needs beside the indexes of messages, built after the load, one statement at a time.

CREATE INDEX ON postroom.header_v{version}
    (left(name, {indexed_chars}), left(value, {indexed_chars}), timestamp, id);
ALTER TABLE postroom.text_v{version} ADD PRIMARY KEY (id);

INSERT INTO postroom.topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM postroom.mailbox_v{version} GROUP BY topic;

ALTER TABLE postroom.topic_v{version} ADD PRIMARY KEY (topic);

-- What a word is was decided when it was written: no parser and no dictionary of PostgreSQL has a say.
CREATE INDEX ON postroom.text_v{version}
    USING gin (array_to_tsvector(array_remove(string_to_array(words, ' '), '')));

-- pg_trgm is in the database where `postroom migrate` found it and was allowed to.
DO $$
DECLARE
    trigrams TEXT;
BEGIN
    SELECT extnamespace::regnamespace INTO trigrams FROM pg_extension WHERE extname = 'pg_trgm';
    IF trigrams IS NOT NULL THEN
        EXECUTE format('CREATE INDEX ON postroom.text_v{version} USING gin (text %s.gin_trgm_ops)', trigrams);
    END IF;
END $$;

VACUUM (FREEZE, ANALYZE) postroom.header_v{version}, postroom.topic_v{version}, postroom.text_v{version};
