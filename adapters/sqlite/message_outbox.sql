-- Sending what transactions recorded for a mailbox.

-- name: find
SELECT position, id, topic, message FROM outbox_messages
WHERE mailbox = :mailbox AND error IS NULL
  AND topic NOT IN (SELECT value FROM json_each(:except_topics))
ORDER BY position LIMIT :limit;

-- The id is compared, as positions of deleted rows are used again.
-- name: delete
DELETE FROM outbox_messages WHERE position = :position AND id = :id;

-- name: refuse
UPDATE outbox_messages SET error = :error WHERE position = :position AND id = :id;
