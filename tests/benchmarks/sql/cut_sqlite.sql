-- Each mailbox with the log time of its last record.
SELECT names.id, names.name,
    (SELECT at FROM log WHERE place > names.id << 40 AND place < (names.id + 1) << 40 ORDER BY place DESC LIMIT 1)
FROM mailbox_names AS names;
