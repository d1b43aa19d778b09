-- Statements of the SQLite event log; `:base` is the place before the mailbox's first record.

-- name: add_mailbox
INSERT OR IGNORE INTO mailbox_names (name) VALUES (:name);

-- name: mailbox_id
SELECT id FROM mailbox_names WHERE name = :name;

-- name: has_tables
SELECT 1 FROM sqlite_schema LIMIT 1;

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT id, name FROM mailbox_names WHERE instr(name, '@') > 0 ORDER BY name;

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

-- name: read_stream
SELECT place - :base, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state, chain,
       timestamp, message_id, content_type, schema_url, schema_version, encryption, correlation_id, principal,
       namespace, trace_id, span_id, custom_headers, envelope
FROM log WHERE stream = :stream AND place > :base AND place <= :top ORDER BY version;

-- name: existing_streams
SELECT 1 FROM log WHERE stream = :stream AND place > :base AND place <= :top LIMIT 1;

-- name: streams_between
SELECT stream FROM log
WHERE stream >= :first AND stream <= :last AND version = 1 AND place > :base AND place <= :top
ORDER BY stream LIMIT :limit;

-- name: replay_first
SELECT place - :base, stream, version, epoch, type, at, topic, shard, attempt, due, reason, state
FROM log WHERE stream = :stream AND version = 1 AND place > :base AND place <= :top;

-- name: mark_removed
UPDATE mailbox_names SET removed_through = max(removed_through, :through) WHERE id = :id;

-- name: truncate
DELETE FROM log WHERE place IN (
    SELECT place FROM log WHERE place > :base AND place <= :base + :through ORDER BY place LIMIT :limit
);

-- name: size
SELECT page_count, freelist_count, page_size,
    (SELECT coalesce(max(place) - min(place) + 1, 0) FROM log WHERE place > :base AND place <= :top),
    (SELECT coalesce(sum(
        (SELECT max(place) FROM log WHERE place > id << 40 AND place < (id + 1) << 40)
        - (SELECT min(place) FROM log WHERE place > id << 40 AND place < (id + 1) << 40) + 1
    ), 0) FROM mailbox_names)
FROM pragma_page_count, pragma_freelist_count, pragma_page_size;

-- name: sizes
-- A row and its index entries take about 150 bytes in addition to its blobs.
SELECT max(place) - :base, sum(bytes) FROM (
    SELECT place, 150 + length(state) + coalesce(length(envelope), 0) + coalesce(length(custom_headers), 0) AS bytes
    FROM log WHERE place > :base + :after AND place <= :top ORDER BY place LIMIT :limit
);

-- name: free
SELECT page_count, page_size, freelist_count > 0 AND auto_vacuum = 2
FROM pragma_page_count, pragma_page_size, pragma_freelist_count, pragma_auto_vacuum;

-- name: save_snapshot
INSERT OR REPLACE INTO snapshot (place, chain, state) VALUES (:base + :position, :chain, :state);

-- name: drop_snapshots
DELETE FROM snapshot WHERE place > :base AND place < :base + :before;

-- name: snapshot_positions
SELECT place - :base FROM snapshot WHERE place > :base AND place <= :top ORDER BY place DESC;

-- name: snapshot
SELECT place - :base, chain, state FROM snapshot WHERE place = :base + :position;

-- name: seal
-- A stale owner that closes late must not overwrite a newer seal.
INSERT INTO seal (base, position, chain) VALUES (:base, :position, :chain)
ON CONFLICT (base) DO UPDATE SET position = excluded.position, chain = excluded.chain
WHERE excluded.position > seal.position;

-- name: sealed
SELECT position, chain FROM seal WHERE base = :base;
