-- The number of the newest read models.
SELECT max(substring(relname FROM '^mailbox_v(\d+)$')::bigint)
FROM pg_class
WHERE relnamespace = 'postroom'::regnamespace AND relkind = 'r';
