-- Sending what transactions recorded for a mailbox.

-- name: exists
SELECT to_regclass('outbox_messages') IS NOT NULL;

-- name: find
SELECT position, id, topic, message FROM outbox_messages
WHERE mailbox = :mailbox AND error IS NULL AND topic <> ALL(CAST(:except_topics AS text[]))
ORDER BY position LIMIT :limit;

-- name: count
SELECT mailbox, count(*) FILTER (WHERE waiting), count(*) FILTER (WHERE NOT waiting),
    min(position) FILTER (WHERE waiting)
FROM (
    SELECT left(mailbox, 255) AS mailbox, error IS NULL AS waiting, position
    FROM outbox_messages ORDER BY position LIMIT :limit
) AS first
GROUP BY mailbox;

-- name: find_refused
SELECT id, topic, error
FROM (SELECT position, id, mailbox, topic, error FROM outbox_messages ORDER BY position LIMIT :counted) AS first
WHERE mailbox = :mailbox AND error IS NOT NULL
ORDER BY position LIMIT :limit;

-- name: retry
UPDATE outbox_messages SET error = NULL
WHERE position IN (
    SELECT position
    FROM (SELECT position, id, mailbox, error FROM outbox_messages ORDER BY position LIMIT :counted) AS first
    WHERE mailbox = :mailbox AND error IS NOT NULL
      AND (CAST(:ids AS text[]) IS NULL OR id = ANY(CAST(:ids AS text[])))
);

-- name: row
SELECT id, message FROM outbox_messages WHERE position = :position;

-- The id is compared, as positions are used again after TRUNCATE ... RESTART IDENTITY or a restored backup.
-- name: settle
WITH refused AS (
    UPDATE outbox_messages AS message SET error = refusal.error
    FROM unnest(CAST(:refused AS bigint[]), CAST(:refused_ids AS text[]), CAST(:errors AS text[]))
        AS refusal (position, id, error)
    WHERE message.position = refusal.position AND message.id = refusal.id
)
DELETE FROM outbox_messages AS message
USING unnest(CAST(:sent AS bigint[]), CAST(:sent_ids AS text[])) AS sent (position, id)
WHERE message.position = sent.position AND message.id = sent.id;
