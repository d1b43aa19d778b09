WITH ours AS (
    SELECT oid FROM pg_namespace WHERE nspname NOT LIKE 'pg\_%' AND nspname <> 'information_schema'
), of_extensions AS (
    SELECT classid, objid FROM pg_depend WHERE deptype = 'e'
)
SELECT format('%s %s %s %s %s', relkind, c.oid::regclass, pg_get_partkeydef(c.oid), reloptions, relacl)
FROM pg_class AS c WHERE relnamespace IN (SELECT oid FROM ours)
    AND (1259, c.oid) NOT IN (SELECT classid::int, objid FROM of_extensions)
UNION ALL
SELECT format('%s.%s %s null %s default %s %s %s %s', attrelid::regclass, attname,
    format_type(atttypid, atttypmod), NOT attnotnull, pg_get_expr(adbin, adrelid), attidentity, attstorage,
    attcompression)
FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
WHERE attnum > 0 AND NOT attisdropped AND relkind IN ('r', 'p', 'v') AND relnamespace IN (SELECT oid FROM ours)
UNION ALL
SELECT format('%s: %s', conrelid::regclass, pg_get_constraintdef(oid))
FROM pg_constraint WHERE connamespace IN (SELECT oid FROM ours)
UNION ALL
SELECT indexdef FROM pg_indexes WHERE schemaname::regnamespace IN (SELECT oid FROM ours)
UNION ALL
SELECT format('%s %s', pg_get_functiondef(p.oid), proacl)
FROM pg_proc AS p WHERE pronamespace IN (SELECT oid FROM ours)
    AND (1255, p.oid) NOT IN (SELECT classid::int, objid FROM of_extensions)
UNION ALL
SELECT format('%s: %s', tgrelid::regclass, pg_get_triggerdef(oid)) FROM pg_trigger WHERE NOT tgisinternal
UNION ALL
SELECT format('extension %s', extname) FROM pg_extension
WHERE extname <> 'plpgsql'
ORDER BY 1;
