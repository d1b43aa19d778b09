-- Owners and relays that wait are notified of what is recorded (ADR 0138). An advisory lock tells that one waits, so that
-- PostgreSQL serialises the commits of no others: 100 is a key beside the numbers of partitions.
CREATE FUNCTION outbox_notify_listeners() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(TG_ARGV[0], CAST(TG_TABLE_SCHEMA AS text));
    RETURN NULL;
END
$$;

CREATE TRIGGER notify_listeners AFTER INSERT ON outbox_events
    WHEN (NOT pg_try_advisory_xact_lock_shared(CAST(CAST('outbox_events' AS regclass) AS oid)::int, 100))
    EXECUTE FUNCTION outbox_notify_listeners('postroom_outbox');
CREATE TRIGGER notify_listeners AFTER INSERT OR UPDATE ON outbox_messages
    WHEN (NOT pg_try_advisory_xact_lock_shared(CAST(CAST('outbox_messages' AS regclass) AS oid)::int, 100))
    EXECUTE FUNCTION outbox_notify_listeners('postroom_outbox_messages');
