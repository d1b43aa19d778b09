-- Queries on the read models, and on the store.

-- name: few_words
-- The first ids of an index, which returns them in order, and the last of all.
SELECT count(*), json_group_array(rowid), min(rowid), max(rowid), (SELECT max(id) FROM {mailbox})
FROM (SELECT rowid FROM {word_index} WHERE {word_index} MATCH :words LIMIT {limit});

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
