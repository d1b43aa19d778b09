-- Statements of the SQLite event log, each under its name. `:base` is the mailbox's first place.

-- name: add_mailbox
INSERT OR IGNORE INTO mailbox_names (name) VALUES (:name);

-- name: mailbox_id
SELECT id FROM mailbox_names WHERE name = :name;

-- name: mailboxes
SELECT id, name FROM mailbox_names ORDER BY name;

-- name: head
SELECT place - :base, at, chain, epoch FROM log
WHERE place > :base AND place <= :top ORDER BY place DESC LIMIT 1;

-- name: first_position
SELECT min(place) - :base FROM log WHERE place > :base AND place <= :top;

-- name: at_position
SELECT at FROM log WHERE place = :base + :position;

-- name: read
SELECT place - :base, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain,
       timestamp, message_id, content_type, schema_url, schema_version, encryption, correlation_id, principal,
       namespace, trace_id, span_id, custom_headers, envelope
FROM log WHERE place > :base + :after AND place <= :top ORDER BY place LIMIT :limit;

-- name: replay
SELECT place - :base, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state
FROM log WHERE place > :base + :after AND place <= :top ORDER BY place LIMIT :limit;

-- name: history
SELECT place - :base, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain,
       timestamp, message_id, content_type, schema_url, schema_version, encryption, correlation_id, principal,
       namespace, trace_id, span_id, custom_headers, envelope
FROM log WHERE stream = :stream AND place > :base AND place <= :top ORDER BY version;

-- name: known
SELECT 1 FROM log WHERE stream = :stream AND place > :base AND place <= :top LIMIT 1;

-- name: mark_removed
UPDATE mailbox_names SET removed_through = max(removed_through, :through) WHERE id = :id;

-- name: truncate
DELETE FROM log WHERE place IN (
    SELECT place FROM log WHERE place > :base AND place <= :base + :through ORDER BY place LIMIT :limit
);

-- name: save_snapshot
INSERT OR REPLACE INTO snapshot (place, chain, state) VALUES (:base + :position, :chain, :state);

-- name: drop_old_snapshots
DELETE FROM snapshot WHERE place > :base AND place <= :top AND place NOT IN (
    SELECT place FROM snapshot WHERE place > :base AND place <= :top ORDER BY place DESC LIMIT 2
);

-- name: snapshot_positions
SELECT place - :base FROM snapshot WHERE place > :base AND place <= :top ORDER BY place DESC;

-- name: snapshot
SELECT place - :base, chain, state FROM snapshot WHERE place = :base + :position;

-- name: seal
INSERT OR REPLACE INTO seal (base, position, chain) VALUES (:base, :position, :chain);

-- name: sealed
SELECT position, chain FROM seal WHERE base = :base;
