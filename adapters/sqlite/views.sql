-- Queries on the store for the status of the read models.

-- name: heads
-- Logs whose names have no @ are not those of mailboxes.
SELECT name, coalesce((
    SELECT last FROM log
    WHERE place > mailbox_names.id << 40 AND place < (mailbox_names.id + 1) << 40
    ORDER BY place DESC LIMIT 1
), 0)
FROM mailbox_names WHERE instr(name, '@') > 0 ORDER BY name;

-- name: at
-- The commit that holds the next position, if it is there.
SELECT at FROM (
    SELECT log.at, log.last FROM mailbox_names
    JOIN log ON log.place > mailbox_names.id << 40 AND log.place <= (mailbox_names.id << 40) + :position + 1
    WHERE mailbox_names.name = :mailbox ORDER BY log.place DESC LIMIT 1
) WHERE last > :position;
