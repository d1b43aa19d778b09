-- What is built after the load, one statement at a time. Every index ends in the order of search results.
-- An index entry holds 2,700 bytes at most: where senders may write more, the first {indexed_chars} characters lead.

ALTER TABLE postroom.mailbox_v{version} ADD PRIMARY KEY (id);
CREATE INDEX ON postroom.mailbox_v{version} (timestamp, id);
CREATE INDEX ON postroom.mailbox_v{version} (topic, timestamp, id);
CREATE INDEX ON postroom.mailbox_v{version} (mailbox, timestamp, id);
CREATE UNIQUE INDEX ON postroom.mailbox_v{version} (message_id, mailbox);
CREATE INDEX ON postroom.mailbox_v{version} (left(principal, {indexed_chars}), timestamp, id)
    WHERE principal IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (left(correlation_id, {indexed_chars}), timestamp, id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (left(trace_id, {indexed_chars}), timestamp, id)
    WHERE trace_id IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (left(namespace, {indexed_chars}), timestamp, id)
    WHERE namespace IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (status, timestamp, id);
ALTER TABLE postroom.backlog_v{version} ADD PRIMARY KEY (mailbox, topic, shard);
ALTER TABLE postroom.dead_letters_v{version} ADD PRIMARY KEY (id);
CREATE INDEX ON postroom.dead_letters_v{version} (last_seen, id);
CREATE INDEX ON postroom.header_v{version}
    (left(name, {indexed_chars}), left(value, {indexed_chars}), timestamp, id);
ALTER TABLE postroom.text_v{version} ADD PRIMARY KEY (id);

INSERT INTO postroom.topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM postroom.mailbox_v{version} GROUP BY topic;

ALTER TABLE postroom.topic_v{version} ADD PRIMARY KEY (topic);

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

-- Frozen now, as nothing will change any more; and what is visible to all is answered from indexes alone.
VACUUM (FREEZE, ANALYZE) postroom.mailbox_v{version}, postroom.backlog_v{version}, postroom.dead_letters_v{version},
    postroom.header_v{version}, postroom.topic_v{version}, postroom.text_v{version};
