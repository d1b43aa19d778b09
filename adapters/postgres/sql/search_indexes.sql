-- Topics and indexes for search, built after the load.

-- Several parts may have written the same name. Names may be too long for an index.
DO $$
BEGIN
    DELETE FROM postroom.header_v{version} AS header USING postroom.header_v{version} AS other
    WHERE header.name = other.name AND header.ctid > other.ctid;
    CREATE UNIQUE INDEX ON postroom.header_v{version} (md5(name));
END $$;

CREATE INDEX ON postroom.header_v{version} (left(name, {indexed_chars}));
ALTER TABLE postroom.text_v{version} ADD PRIMARY KEY (id);

INSERT INTO postroom.topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM postroom.mailbox_v{version} GROUP BY topic;

ALTER TABLE postroom.topic_v{version} ADD PRIMARY KEY (topic);

-- Words were normalized when they were written, so no parser or dictionary of PostgreSQL is used.
CREATE INDEX ON postroom.text_v{version}
    USING gin (array_to_tsvector(array_remove(string_to_array(words, ' '), '')));

-- `postroom migrate` installs pg_trgm if it is available and permitted.
DO $$
DECLARE
    trigrams TEXT;
BEGIN
    -- It may be in the schema of another store.
    SELECT extnamespace::regnamespace INTO trigrams FROM pg_extension
    WHERE extname = 'pg_trgm' AND has_schema_privilege(extnamespace, 'USAGE');
    IF trigrams IS NOT NULL THEN
        EXECUTE format('CREATE INDEX ON postroom.text_v{version} USING gin (text %s.gin_trgm_ops)', trigrams);
    END IF;
END $$;

VACUUM (FREEZE, ANALYZE) postroom.header_v{version}, postroom.topic_v{version}, postroom.text_v{version};
