-- Queries on the store for the status of the read models.

-- name: heads
-- Logs whose names have no @ are not those of mailboxes.
SELECT name, coalesce((
    SELECT place & 1099511627775 FROM log
    WHERE place > mailbox_names.id << 40 AND place < (mailbox_names.id + 1) << 40
    ORDER BY place DESC LIMIT 1
), 0)
FROM mailbox_names WHERE instr(name, '@') > 0 ORDER BY name;

-- name: at
SELECT log.at FROM mailbox_names
JOIN log ON log.place > (mailbox_names.id << 40) + :position AND log.place < (mailbox_names.id + 1) << 40
WHERE mailbox_names.name = :mailbox ORDER BY log.place LIMIT 1;
