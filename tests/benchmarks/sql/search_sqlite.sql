-- What is searched beside the mailbox rows, one statement at a time.

INSERT INTO topic_v{version} (topic, messages, first_timestamp, last_timestamp)
SELECT topic, count(*), min(timestamp), max(timestamp) FROM mailbox_v{version} GROUP BY topic;

INSERT INTO header_v{version} (name, value, timestamp, id)
SELECT header.key, header.value, message.timestamp, message.id
FROM mailbox_v{version} AS message, json_each(message.custom_headers) AS header
ORDER BY 1, 2, 3, 4;

INSERT INTO text_v{version} (id, text, words)
SELECT
    id,
    lower(
        message_id || char(10) || topic || kind || coalesce(char(10) || nullif(correlation_id, ''), '') || origin
        || coalesce(char(10) || nullif(trace_id, ''), '') || coalesce(char(10) || nullif(span_id, ''), '') || custom
    ),
    ' ' || words(topic || kind || origin || custom) || ' '
FROM (
    SELECT
        id, message_id, topic, correlation_id, trace_id, span_id,
        coalesce(char(10) || nullif(content_type, ''), '')
        || coalesce(char(10) || nullif(schema_url, ''), '')
        || coalesce(char(10) || nullif(schema_version, ''), '')
        || coalesce(char(10) || nullif(encryption, ''), '') AS kind,
        coalesce(char(10) || nullif(principal, ''), '') || coalesce(char(10) || nullif(namespace, ''), '') AS origin,
        coalesce((
            SELECT char(10) || group_concat(key, char(10)) || char(10) || group_concat(value, char(10))
            FROM json_each(custom_headers)
        ), '') AS custom
    FROM mailbox_v{version}
);
