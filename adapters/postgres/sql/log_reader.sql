-- Statements of the log reader of PostgreSQL.

-- name: ping
SELECT 1;

-- name: mailboxes
-- Logs whose names have no @ are not those of mailboxes.
SELECT name, id FROM postroom.mailbox_names WHERE strpos(name, '@') > 0 ORDER BY id;

-- name: bounds
SELECT name, removed_through, coalesce(position, 0)
FROM postroom.mailbox_names LEFT JOIN postroom.seal ON base = id << 40 WHERE strpos(name, '@') > 0;

-- name: first
SELECT place - %(base)s FROM postroom.log
WHERE place > %(base)s AND place <= %(base)s + %(through)s ORDER BY place LIMIT 1;

-- name: last
SELECT least(last, %(through)s), at, encode(chain, 'hex') FROM postroom.log
WHERE place > %(base)s AND place <= %(base)s + %(through)s ORDER BY place DESC LIMIT 1;

-- name: begin
-- The commit that holds a position may begin before it.
SELECT place FROM postroom.log WHERE place > {base} AND place <= {place} ORDER BY place DESC LIMIT 1;

-- name: commits
SELECT place - {base}, last, epoch, at, chain, events, {envelopes} FROM postroom.log
WHERE place BETWEEN {begin} AND {end} ORDER BY place;
