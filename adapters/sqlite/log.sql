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
SELECT last, at, chain, epoch FROM log
WHERE place > :base AND place <= :top ORDER BY place DESC LIMIT 1;

-- name: first_position
SELECT min(place) - :base FROM log WHERE place > :base AND place <= :top;

-- name: commit_at
-- The commit that holds a position, or the last one before it.
SELECT place - :base, last, at FROM log
WHERE place > :base AND place <= :base + :position ORDER BY place DESC LIMIT 1;

-- name: commits
SELECT place - :base, last, epoch, at, chain, events, envelopes FROM log
WHERE place <= :top AND last > :after AND place >= coalesce(
    (SELECT max(place) FROM log WHERE place > :base AND place <= :base + :after), :base
) ORDER BY place;

-- name: commits_without_envelopes
SELECT place - :base, last, epoch, at, chain, events, x'' FROM log
WHERE place <= :top AND last > :after AND place >= coalesce(
    (SELECT max(place) FROM log WHERE place > :base AND place <= :base + :after), :base
) ORDER BY place;

-- name: index_of
-- All at once, as `add_first_entries`.
SELECT stream, version, position, last FROM json_each(:numbers) CROSS JOIN log_index
WHERE mailbox = :mailbox AND stream = substr(:streams, 16 * json_each.value + 1, 16) ORDER BY stream, version;

-- name: streams_between
SELECT stream FROM log_index
WHERE mailbox = :mailbox AND stream >= :first AND stream <= :last AND version = 1 ORDER BY stream LIMIT :limit;

-- name: append
-- Nothing is inserted where retention removed commits: another process owns the log.
INSERT INTO log (place, last, epoch, at, chain, events, envelopes)
SELECT :place, :last, :epoch, :at, :chain, :events, :envelopes
WHERE (SELECT removed_through FROM mailbox_names WHERE id = :mailbox) < :place & 0xFFFFFFFFFF;

-- name: add_first_entries
-- All at once, as each statement takes the interpreter's lock anew. `streams` is joined, `positions` a JSON array.
INSERT INTO log_index (mailbox, stream, version, position)
SELECT :mailbox, substr(:streams, 16 * key + 1, 16), 1, value FROM json_each(:positions);

-- name: add_entry
INSERT INTO log_index (mailbox, stream, version, position, last)
VALUES (:mailbox, :stream, :version, :position, :last);

-- name: set_last
-- All at once, as `add_first_entries`; joined in this order, as `UPDATE ... FROM` reads the whole index.
INSERT INTO log_index (mailbox, stream, version, position, last)
SELECT mailbox, stream, version, position, value FROM json_each(:lasts) CROSS JOIN log_index
WHERE mailbox = :mailbox AND stream = substr(:streams, 16 * key + 1, 16) AND version = 1
ON CONFLICT DO UPDATE SET last = excluded.last;

-- name: mark_removed
UPDATE mailbox_names SET removed_through = max(removed_through, :through) WHERE id = :mailbox;

-- name: oldest
SELECT place - :base, last, epoch, at, chain, events, x'' FROM log
WHERE place > :base AND place <= :base + :through AND last <= :through ORDER BY place;

-- name: truncate
DELETE FROM log WHERE place > :base AND place <= :base + :through;

-- name: drop_entries
DELETE FROM log_index WHERE mailbox = :mailbox AND stream = :stream AND position <= :through;

-- name: size
-- Pages of the file, and the positions of the mailbox and of all mailboxes.
WITH extent AS (
    SELECT id,
        (SELECT place - (id << 40) FROM log WHERE place > id << 40 AND place < (id + 1) << 40 ORDER BY place LIMIT 1) AS first,
        (SELECT last FROM log WHERE place > id << 40 AND place < (id + 1) << 40 ORDER BY place DESC LIMIT 1) AS last
    FROM mailbox_names
)
SELECT page_count, freelist_count, page_size,
    (SELECT coalesce(sum(last - first + 1), 0) FROM extent WHERE id = :mailbox),
    (SELECT coalesce(sum(last - first + 1), 0) FROM extent)
FROM pragma_page_count, pragma_freelist_count, pragma_page_size;

-- name: sizes
-- A row takes about 100 bytes in addition to its blobs, and an event about 15 for its part of an entry of the index.
SELECT last, 100 + length(events) + length(envelopes) + 15 * (last - place + :base + 1) FROM log
WHERE place > :base + :after AND place <= :top ORDER BY place LIMIT :limit;

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
