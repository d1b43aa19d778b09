-- Queries on the store for the status of the read models.

-- name: at
-- The commit that holds the next position, if it is there.
SELECT at FROM (
    SELECT log.at, log.last FROM mailbox_names
    JOIN log ON log.place > mailbox_names.id << 40 AND log.place <= (mailbox_names.id << 40) + :position + 1
    WHERE mailbox_names.name = :mailbox ORDER BY log.place DESC LIMIT 1
) WHERE last > :position;
