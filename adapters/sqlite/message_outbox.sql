-- Sending what transactions recorded for a mailbox.

-- name: find
SELECT position, id, topic, message FROM outbox_messages
WHERE mailbox = :mailbox AND error IS NULL
  AND topic NOT IN (SELECT value FROM json_each(:except_topics))
ORDER BY position LIMIT :limit;

-- The id is compared, as positions of deleted rows are used again. One that is not UTF-8 is passed as bytes.
-- name: delete
DELETE FROM outbox_messages WHERE position = :position AND (id = :id OR id = CAST(:id AS TEXT));

-- name: refuse
UPDATE outbox_messages SET error = :error WHERE position = :position AND (id = :id OR id = CAST(:id AS TEXT));
