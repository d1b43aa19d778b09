-- The bytes of each table and index of the store; tables with those of their TOAST tables.
SELECT relname, CASE relkind WHEN 'r' THEN pg_table_size(oid) ELSE pg_relation_size(oid) END
FROM pg_class
WHERE relnamespace = 'postroom'::regnamespace AND relkind IN ('r', 'i') ORDER BY 2 DESC;
