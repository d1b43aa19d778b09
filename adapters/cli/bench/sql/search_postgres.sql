-- What is searched beside the mailbox rows, one statement at a time.

INSERT INTO bench.text (id, text)
SELECT id, lower(concat_ws(
    E'\n', message_id, topic, nullif(content_type, ''), nullif(schema_url, ''), nullif(schema_version, ''),
    nullif(encryption, ''), nullif(correlation_id, ''), nullif(principal, ''), nullif(namespace, ''),
    nullif(trace_id, ''), nullif(span_id, ''),
    (SELECT string_agg(name, E'\n') FROM json_object_keys(custom_headers::json) AS name),
    (SELECT string_agg(value, E'\n') FROM json_each_text(custom_headers::json))
)) FROM bench.mailbox;

INSERT INTO bench.header (name, value, timestamp, id)
SELECT key, value, timestamp, id FROM bench.mailbox, json_each_text(custom_headers::json);

INSERT INTO bench.topic (topic, messages, first_timestamp, last_timestamp)
SELECT topic, count(*), min(timestamp), max(timestamp) FROM bench.mailbox GROUP BY topic;
