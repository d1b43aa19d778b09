-- Backing up SQLite stores.

-- name: mailboxes
SELECT name FROM mailbox_names ORDER BY name;

-- name: tables
SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite\_%' ESCAPE '\' ORDER BY name;

-- name: recorded_messages
SELECT id, mailbox, topic, message, error FROM outbox_messages ORDER BY position;

-- name: record_message
INSERT INTO outbox_messages (id, mailbox, topic, message, error) VALUES (?, ?, ?, ?, ?);

-- name: add_mailbox
INSERT INTO mailbox_names (name, removed_through) VALUES (?, ?) RETURNING id;

-- name: entries
SELECT stream, version, position, last FROM log_index WHERE mailbox = (SELECT id FROM mailbox_names WHERE name = ?);

-- name: last_events
SELECT stream, position, last FROM log_index
WHERE mailbox = (SELECT id FROM mailbox_names WHERE name = ?) AND last IS NOT NULL ORDER BY last;

-- name: add_commit
INSERT INTO log (place, last, epoch, at, chain, events, envelopes) VALUES (?, ?, ?, ?, ?, ?, ?);

-- name: add_entry
INSERT INTO log_index (mailbox, stream, version, position, last) VALUES (?, ?, ?, ?, ?);

-- name: add_snapshot
INSERT INTO snapshot (place, chain, state) VALUES (?, ?, ?);

-- name: add_seal
INSERT INTO seal (base, position, chain) VALUES (?, ?, ?);

-- name: ends
SELECT id, (SELECT max(place) FROM log WHERE place > id << 40 AND place < (id + 1) << 40) FROM mailbox_names;
