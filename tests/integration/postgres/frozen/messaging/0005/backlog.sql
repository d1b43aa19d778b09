-- Backlog of a context's outbox and inbox in one snapshot, from indexes of unsettled rows; times in µs since 1970 UTC.

-- name: backlog
SELECT 'outbox', count(*), (
           SELECT count(*) FROM outbox_retries AS retry JOIN outbox_events AS event ON event.id = retry.id
           WHERE retry.retry_at IS NULL AND event.published_at IS NULL
       ), CAST(extract(epoch FROM min(occurred_at) FILTER (
           WHERE occurred_at >= '0001-01-01 00:00:00+00' AND isfinite(occurred_at)
       )) * 1000000 AS bigint), CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)
FROM outbox_events WHERE published_at IS NULL
UNION ALL
SELECT 'inbox', count(*) FILTER (WHERE dead_lettered_at IS NULL), count(dead_lettered_at),
       CAST(extract(epoch FROM min(received_at) FILTER (
           WHERE dead_lettered_at IS NULL AND received_at >= '0001-01-01 00:00:00+00' AND isfinite(received_at)
       )) * 1000000 AS bigint), CAST(extract(epoch FROM statement_timestamp()) * 1000000 AS bigint)
FROM inbox_messages WHERE processed_at IS NULL;
