-- Insert one copy of a segment of the originals; see `long_log.py`.
INSERT INTO log (
    place, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain, timestamp, message_id,
    content_type, schema_url, schema_version, encryption, correlation_id, principal, namespace, trace_id, span_id,
    custom_headers, envelope
)
SELECT
    :base + place % (1 << 40) + :shift,
    copied_stream(stream, :copy, :copies, :began_ms, :late_ms),
    version, epoch, type,
    :began + (at - :start + :late) / :copies,
    topic, shard, attempt,
    due - at + :began + (at - :start + :late) / :copies,
    reason, state, chain,
    timestamp - at / 1000 + (:began + (at - :start + :late) / :copies) / 1000,
    message_id, content_type, schema_url, schema_version, encryption,
    correlation_id || '-' || :copy,
    principal, namespace, trace_id, span_id, custom_headers, envelope
FROM originals.log
WHERE place % (1 << 40) BETWEEN :first AND :last
ORDER BY place;
