-- Statements of the log reader of SQLite; `base` is the place before a mailbox's first commit.

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT name, id FROM mailbox_names WHERE instr(name, '@') > 0 ORDER BY id;

-- name: heads
SELECT name, last FROM (
    SELECT name, id, (
        SELECT last FROM log WHERE place > id << 40 AND place < (id + 1) << 40 ORDER BY place DESC LIMIT 1
    ) AS last
    FROM mailbox_names WHERE instr(name, '@') > 0
) WHERE last IS NOT NULL ORDER BY id;

-- name: bounds
SELECT name, removed_through, coalesce((SELECT position FROM seal WHERE base = id << 40), 0)
FROM mailbox_names WHERE instr(name, '@') > 0;

-- name: first
SELECT place - {base} FROM log WHERE place > {base} AND place <= {base} + {through} ORDER BY place LIMIT 1;

-- name: last
SELECT min(last, {through}), at, lower(hex(chain)) FROM log
WHERE place > {base} AND place <= {base} + {through} ORDER BY place DESC LIMIT 1;

-- name: commits
-- The commit that holds the first position may begin before it.
SELECT place - {base}, last, epoch, at, chain, events, {envelopes} FROM log
WHERE place <= {base} + {last} AND place >= coalesce(
    (SELECT max(place) FROM log WHERE place > {base} AND place <= {base} + {first}), {base} + {first}
) ORDER BY place;
