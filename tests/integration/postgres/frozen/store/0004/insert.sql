-- Appends, reduced to what they ask of the table: with all columns, and with the fewest.
SELECT postroom.make_partitions(id, 100) FROM postroom.mailbox_names;

INSERT INTO postroom.log (
    place, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain, timestamp, message_id,
    content_type, schema_url, schema_version, encryption, correlation_id, principal, namespace, trace_id, span_id,
    custom_headers, envelope
)
SELECT (id << 40) + 31, 's', 1, 1, 'Full.1', 1, 't', 1, 1, 1, 'r', 's', 'c', 1, 'm', 'c', 'u', 'v', 'e', 'c', 'p', 'n', 't',
    's', '{}', 'e'
FROM postroom.mailbox_names;

INSERT INTO postroom.log (place, stream, version, epoch, type, at, state, chain)
SELECT (id << 40) + 32, 's', 2, 1, 'Bare.1', 1, 's', 'c' FROM postroom.mailbox_names
WHERE (SELECT removed_through FROM postroom.mailbox_names) < 32;
