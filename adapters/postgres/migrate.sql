-- Bookkeeping of migrations; `{table}` is `postroom_migrations`, in the schema of the set.

-- name: lock
-- One for all schemas of a database, as migrations may create an extension.
SELECT pg_advisory_xact_lock(hashtextextended(%(name)s, 0));

-- name: find_table
-- Locking a table lets the session see one that another has created since it looked last, also in a transaction.
SELECT to_regclass(%(table)s) FROM pg_class LIMIT 1;

-- name: find_schema
-- Who was given a schema may not create it, not even IF NOT EXISTS.
SELECT FROM pg_namespace WHERE nspname = %(schema)s;

-- name: others
-- The first of the tables that no set has.
SELECT relname FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace
WHERE nspname = %(schema)s AND relkind IN ('r', 'p', 'v', 'm', 'f') AND NOT relispartition
    AND relname <> ALL(%(known)s::text[])
ORDER BY 1 LIMIT 5;

-- name: create_schema
CREATE SCHEMA {schema};

-- name: create_table
CREATE TABLE IF NOT EXISTS {table} (
    set        TEXT NOT NULL,
    number     INT NOT NULL,
    name       TEXT NOT NULL,
    checksum   TEXT NOT NULL,
    applied_at TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    PRIMARY KEY (set, number)
);

-- name: applied
SELECT number, name, checksum FROM {table} WHERE set = %(set)s ORDER BY number;

-- name: format
SELECT number, name FROM {table} WHERE set = 'format' ORDER BY number DESC LIMIT 1;

-- name: roles
SELECT rolname FROM pg_roles;

-- name: record
INSERT INTO {table} (set, number, name, checksum) VALUES (%(set)s, %(number)s, %(name)s, %(checksum)s);

-- name: schema
SELECT relnamespace::regnamespace::text, nspname, pg_get_userbyid(relowner) FROM pg_class JOIN pg_namespace AS n ON n.oid = relnamespace
WHERE pg_class.oid = to_regclass(%(table)s);

-- name: owners
-- Those who make partitions, read models and later tables.
SELECT pg_get_userbyid(relowner) FROM pg_class WHERE relnamespace = %(schema)s::regnamespace
UNION SELECT current_user ORDER BY 1;

-- name: not_granted
SELECT oid::regclass::text, pg_get_userbyid(relowner) FROM pg_class
WHERE relnamespace = %(schema)s::regnamespace AND relkind IN ('r', 'p', 'v')
    AND (%(tables)s::text[] IS NULL OR relname = ANY(%(tables)s::text[]))
    AND NOT (
        has_table_privilege(%(role)s, oid, 'SELECT')
        AND (relname = 'postroom_migrations' OR (
            has_table_privilege(%(role)s, oid, 'INSERT') AND has_table_privilege(%(role)s, oid, 'UPDATE')
            AND has_table_privilege(%(role)s, oid, 'DELETE')
        ))
    )
ORDER BY 1 LIMIT 1;

-- name: grant_use
GRANT USAGE ON SCHEMA {schema} TO {role};

-- name: grant_tables
GRANT {rights} ON {tables} TO {role};

-- name: grant_functions
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role};

-- name: protect_migrations
REVOKE ALL ON {table} FROM {role};
GRANT SELECT ON {table} TO {role};

-- name: grant_later_tables
ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT {rights} ON TABLES TO {role};

-- name: grant_later_functions
ALTER DEFAULT PRIVILEGES FOR ROLE {owner} IN SCHEMA {schema} GRANT EXECUTE ON FUNCTIONS TO {role};
