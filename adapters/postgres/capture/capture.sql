-- Statements on the slot, the publication and the table of a capture.

-- name: describe
SELECT current_setting('wal_level'), current_setting('server_encoding'), CAST(to_regclass(:table) AS oid),
       (SELECT array_agg(attname ORDER BY attnum) FROM pg_attribute
        WHERE attrelid = to_regclass(:table) AND attnum > 0 AND NOT attisdropped),
       (SELECT pubinsert FROM pg_publication WHERE pubname = :publication),
       EXISTS (SELECT FROM pg_publication_tables
               WHERE pubname = :publication AND schemaname = :schema AND tablename = :name);

-- name: slot
SELECT plugin, database = current_database(), wal_status, active_pid,
       CAST(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn) AS bigint),
       CAST(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn) AS bigint), safe_wal_size
FROM pg_replication_slots WHERE slot_name = :slot;

-- name: end
SELECT CAST(pg_wal_lsn_diff(pg_current_wal_flush_lsn(), '0/0') AS bigint);

-- name: create_slot
SELECT pg_create_logical_replication_slot(:slot, 'pgoutput');
