-- Each mailbox with the log time of its last record.
SELECT names.id, names.name, last.at
FROM postroom.mailbox_names AS names, LATERAL (
    SELECT at FROM postroom.log
    WHERE place > names.id << 40 AND place < (names.id + 1) << 40
    ORDER BY place DESC LIMIT 1
) AS last;
