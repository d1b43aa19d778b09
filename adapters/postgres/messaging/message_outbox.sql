-- Sending what transactions recorded for a mailbox.

-- name: exists
SELECT to_regclass('outbox_messages') IS NOT NULL;

-- name: find
SELECT position, id, topic, message FROM outbox_messages
WHERE mailbox = :mailbox AND error IS NULL AND topic <> ALL(CAST(:except_topics AS text[]))
ORDER BY position LIMIT :limit;

-- name: settle
WITH refused AS (
    UPDATE outbox_messages AS message SET error = refusal.error
    FROM unnest(CAST(:refused AS bigint[]), CAST(:errors AS text[])) AS refusal (position, error)
    WHERE message.position = refusal.position
)
DELETE FROM outbox_messages WHERE position = ANY(CAST(:sent AS bigint[]));
