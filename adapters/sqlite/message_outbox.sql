-- Sending what transactions recorded for a mailbox.

-- name: find
SELECT position, id, topic, message FROM outbox_messages
WHERE mailbox = :mailbox AND error IS NULL
  AND topic NOT IN (SELECT value FROM json_each(:except_topics))
ORDER BY position LIMIT :limit;

-- name: exists
SELECT EXISTS (SELECT 1 FROM sqlite_schema WHERE name = 'outbox_messages');

-- name: has_rows
SELECT EXISTS (SELECT 1 FROM outbox_messages);

-- The type of `error` is in the header of a row: its text, behind that of a large message, is not read.
-- name: count
SELECT mailbox, sum(waiting), sum(NOT waiting), min(CASE WHEN waiting THEN position END)
FROM (
    SELECT substr(CAST(mailbox AS TEXT), 1, 255) AS mailbox, typeof(error) = 'null' AS waiting, position
    FROM outbox_messages ORDER BY position LIMIT :limit
)
GROUP BY mailbox;

-- name: row
SELECT id, message FROM outbox_messages WHERE position = :position;

-- The id is compared, as positions of deleted rows are used again. One that is not UTF-8 is passed as bytes.
-- name: delete
DELETE FROM outbox_messages WHERE position = :position AND (id = :id OR id = CAST(:id AS TEXT));

-- name: find_refused
SELECT id, topic, error
FROM (SELECT position, id, mailbox, topic, error FROM outbox_messages ORDER BY position LIMIT :counted)
WHERE mailbox = :mailbox AND error IS NOT NULL
ORDER BY position LIMIT :limit;

-- name: retry
UPDATE outbox_messages SET error = NULL
WHERE position IN (
    SELECT position
    FROM (SELECT position, id, mailbox, error FROM outbox_messages ORDER BY position LIMIT :counted)
    WHERE mailbox = :mailbox AND error IS NOT NULL
      AND (:ids IS NULL OR id IN (SELECT value FROM json_each(:ids)))
);

-- name: refuse
UPDATE outbox_messages SET error = :error WHERE position = :position AND (id = :id OR id = CAST(:id AS TEXT));
