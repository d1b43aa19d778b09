-- The bytes of each table and index of the store; the size of a table includes its TOAST table.
SELECT relname, CASE relkind WHEN 'r' THEN pg_table_size(oid) ELSE pg_relation_size(oid) END
FROM pg_class
WHERE relnamespace = 'postroom'::regnamespace AND relkind IN ('r', 'i') ORDER BY 2 DESC;
