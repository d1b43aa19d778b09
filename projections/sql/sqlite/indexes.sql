-- What is built after the load, one statement at a time. Every index ends in the order of search results.

CREATE INDEX mailbox_v{version}_timestamp ON mailbox_v{version} (timestamp, id);
CREATE INDEX mailbox_v{version}_topic ON mailbox_v{version} (topic, timestamp, id);
CREATE INDEX mailbox_v{version}_mailbox ON mailbox_v{version} (mailbox, timestamp, id);
CREATE UNIQUE INDEX mailbox_v{version}_message_id ON mailbox_v{version} (message_id, mailbox);
CREATE INDEX mailbox_v{version}_principal ON mailbox_v{version} (principal, timestamp, id) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_correlation_id ON mailbox_v{version} (correlation_id, timestamp, id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_trace_id ON mailbox_v{version} (trace_id, timestamp, id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_namespace ON mailbox_v{version} (namespace, timestamp, id) WHERE namespace IS NOT NULL;
CREATE INDEX mailbox_v{version}_status ON mailbox_v{version} (status, timestamp, id);
CREATE INDEX dead_letters_v{version}_last_seen ON dead_letters_v{version} (last_seen, id);

INSERT INTO topic_v{version}
SELECT topic, count(*), min(timestamp), max(timestamp) FROM mailbox_v{version} GROUP BY topic;

INSERT INTO header_v{version}
SELECT header.key, header.value, message.timestamp, message.id
FROM mailbox_v{version} AS message, json_each(message.custom_headers) AS header
WHERE message.custom_headers IS NOT NULL
ORDER BY 1, 2, 3, 4;

-- The same text as `postroom.domain.search.searchable_text`. SQLite's lower() knows ASCII only.
INSERT INTO text_v{version}
SELECT id, CASE WHEN length(text) = length(CAST(text AS BLOB)) THEN lower(text) ELSE unicode_lower(text) END
FROM (
    SELECT id, message_id || char(10) || topic
        || coalesce(char(10) || content_type, '')
        || coalesce(char(10) || schema_url, '')
        || coalesce(char(10) || schema_version, '')
        || coalesce(char(10) || encryption, '')
        || coalesce(char(10) || correlation_id, '')
        || coalesce(char(10) || principal, '')
        || coalesce(char(10) || namespace, '')
        || coalesce(char(10) || trace_id, '')
        || coalesce(char(10) || span_id, '')
        || coalesce((
            SELECT char(10) || group_concat(key || char(10) || value, char(10)) FROM json_each(custom_headers)
        ), '') AS text
    FROM mailbox_v{version}
);

INSERT INTO text_index_v{version} (rowid, text) SELECT id, text FROM text_v{version};

ANALYZE mailbox_v{version};
