-- The number of the newest read models.
SELECT max(CAST(substr(name, length('mailbox_v') + 1) AS INTEGER))
FROM sqlite_master WHERE type = 'table' AND name GLOB 'mailbox_v[0-9]*';
