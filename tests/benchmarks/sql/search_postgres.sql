-- What is searched beside the mailbox rows, one statement at a time.

INSERT INTO bench.text (id, text, words)
SELECT
    id,
    lower(concat_ws(
        E'\n', message_id, topic, nullif(content_type, ''), nullif(schema_url, ''), nullif(schema_version, ''),
        nullif(encryption, ''), nullif(correlation_id, ''), nullif(principal, ''), nullif(namespace, ''),
        nullif(trace_id, ''), nullif(span_id, ''), custom.names, custom.values
    )),
    ' ' || regexp_replace(lower(concat_ws(
        ' ', topic, nullif(content_type, ''), nullif(schema_url, ''), nullif(schema_version, ''),
        nullif(encryption, ''), nullif(principal, ''), nullif(namespace, ''), custom.names, custom.values
    )), '[^a-z0-9_]', ' ', 'g') || ' '
FROM bench.mailbox LEFT JOIN LATERAL (
    SELECT string_agg(key, E'\n') AS names, string_agg(value, E'\n') AS values
    FROM json_each_text(custom_headers::json)
) AS custom ON true;

INSERT INTO bench.header (name, value, timestamp, id)
SELECT key, value, timestamp, id FROM bench.mailbox, json_each_text(custom_headers::json);

INSERT INTO bench.topic (topic, messages, first_timestamp, last_timestamp)
SELECT topic, count(*), min(timestamp), max(timestamp) FROM bench.mailbox GROUP BY topic;
