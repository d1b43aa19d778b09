-- What waits in a context's outbox and inbox. One statement sees one moment, and reads indexes of what is unsettled.

-- name: backlog
SELECT 'outbox', count(*), (
           SELECT count(*) FROM outbox_retries AS retry JOIN outbox_events AS event ON event.id = retry.id
           WHERE retry.retry_at IS NULL AND event.published_at IS NULL
       ), min(occurred_at), statement_timestamp()
FROM outbox_events WHERE published_at IS NULL
UNION ALL
SELECT 'inbox', count(*) FILTER (WHERE dead_lettered_at IS NULL), count(dead_lettered_at),
       min(received_at) FILTER (WHERE dead_lettered_at IS NULL), statement_timestamp()
FROM inbox_messages WHERE processed_at IS NULL;
