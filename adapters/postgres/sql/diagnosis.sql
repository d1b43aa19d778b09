-- Facts about a PostgreSQL server and the rights of its user, for `postroom doctor`.

-- name: version
SELECT current_setting('server_version'), current_setting('server_version_num')::int, pg_is_in_recovery();

-- name: durability
SELECT name, setting FROM pg_settings WHERE name IN ('fsync', 'full_page_writes', 'synchronous_commit') ORDER BY name;

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint;

-- name: missing_rights
-- Partitions are used through their tables, whose privileges apply.
SELECT c.relname, p.name, current_user
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN (VALUES ('SELECT'), ('INSERT'), ('UPDATE'), ('DELETE')) AS p(name)
WHERE n.nspname = 'postroom' AND c.relkind IN ('r', 'p') AND NOT c.relispartition
    AND c.relname <> 'postroom_migrations'
    AND NOT has_table_privilege(c.oid, p.name)
ORDER BY c.relname, p.name;

-- name: connections
SELECT count(*), current_setting('max_connections')::int FROM pg_stat_activity WHERE backend_type = 'client backend';
