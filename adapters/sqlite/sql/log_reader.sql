-- Statements of the log reader of SQLite; `base` is the place before a mailbox's first record.

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT name, id FROM mailbox_names WHERE instr(name, '@') > 0 ORDER BY id;

-- name: heads
SELECT name, last - (id << 40) FROM (
    SELECT name, id, (SELECT max(place) FROM log WHERE place > id << 40 AND place < (id + 1) << 40) AS last
    FROM mailbox_names WHERE instr(name, '@') > 0
) WHERE last IS NOT NULL ORDER BY id;

-- name: first
SELECT place - {base} FROM log WHERE place > {base} AND place <= {through} ORDER BY place LIMIT 1;

-- name: last
SELECT place - {base}, at FROM log WHERE place > {base} AND place <= {through} ORDER BY place DESC LIMIT 1;
