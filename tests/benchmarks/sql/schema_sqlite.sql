-- The tables and indexes of a version of the read models; an index that comes with its table has no statement.
SELECT type, tbl_name, sql FROM sqlite_master
WHERE sql IS NOT NULL AND type IN ('table', 'index') AND tbl_name LIKE '%\_v' || :version ESCAPE '\'
ORDER BY rowid;
