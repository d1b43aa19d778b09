-- Queries on the store for the status of the read models.

-- name: at
-- The commit that holds the next position, if it is there.
SELECT at FROM (
    SELECT log.at, log.last FROM mailbox_names
    JOIN log ON log.place > mailbox_names.id << 40 AND log.place <= (mailbox_names.id << 40) + :position + 1
    WHERE mailbox_names.name = :mailbox ORDER BY log.place DESC LIMIT 1
) WHERE last > :position;

-- name: commits
-- The commits that may hold places.
SELECT place, last, events, envelopes FROM log
WHERE place IN (SELECT (SELECT max(place) FROM log WHERE place <= value) FROM json_each(:places)) ORDER BY place;
