-- Recording messages for a mailbox in the caller's transaction, by dialect.

-- name: postgresql
WITH recorded AS (
    INSERT INTO outbox_messages (id, mailbox, topic, message)
    SELECT id, :mailbox, topic, message
    FROM jsonb_to_recordset(CAST(CAST(:messages AS text) AS jsonb)) AS new (id text, topic text, message text)
)
SELECT CASE WHEN CAST(:wake AS boolean) THEN CAST(pg_notify('postroom_outbox_messages', CAST(:schema AS text)) AS text) END;

-- The owner reads `main` alone, so a table of an attached or temporary database must not be used instead.
-- name: sqlite
INSERT INTO main.outbox_messages (id, mailbox, topic, message)
SELECT json_extract(value, '$.id'), :mailbox, json_extract(value, '$.topic'), json_extract(value, '$.message')
FROM json_each(:messages) ORDER BY key;

-- name: create_in_sqlite
CREATE TABLE IF NOT EXISTS main.outbox_messages (
    position INTEGER PRIMARY KEY,
    id       TEXT NOT NULL,
    mailbox  TEXT NOT NULL,
    topic    TEXT NOT NULL,
    message  TEXT NOT NULL,
    error    TEXT
);
