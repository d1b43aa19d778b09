-- Insert one copy of a segment of the originals; see `long_log.py`.
INSERT INTO postroom.log (
    place, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain, timestamp, message_id,
    content_type, schema_url, schema_version, encryption, correlation_id, principal, namespace, trace_id, span_id,
    custom_headers, envelope
)
SELECT
    %(base)s::bigint + place + %(shift)s,
    substring(int8send(
        %(began_ms)s
        + (('x' || encode(substring(stream FOR 6), 'hex'))::bit(48)::bigint - %(began_ms)s + %(late_ms)s) / %(copies)s
    ) FROM 3) || substring(stream FROM 7 FOR 3) || substring(int4send(%(copy)s) FROM 2) || substring(stream FROM 13),
    version, epoch, type,
    %(began)s + (at - %(start)s + %(late)s) / %(copies)s,
    topic, shard, attempt,
    due - at + %(began)s + (at - %(start)s + %(late)s) / %(copies)s,
    reason, state, chain,
    timestamp - at / 1000 + (%(began)s + (at - %(start)s + %(late)s) / %(copies)s) / 1000,
    message_id, content_type, schema_url, schema_version, encryption,
    correlation_id || '-' || %(copy)s::text,
    principal, namespace, trace_id, span_id, custom_headers, envelope
FROM original
WHERE place BETWEEN %(first)s AND %(last)s
ORDER BY place;
