-- The bytes of each table and index of the read models, without the pages of the catalog.
SELECT name, sum(pgsize) FROM dbstat WHERE name GLOB '*_v[0-9]*' GROUP BY name ORDER BY 2 DESC;
