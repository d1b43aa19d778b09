-- Statements of the SQLite lease store.

-- name: last_version
SELECT max(version) FROM lease_events WHERE aggregate = :aggregate;

-- name: last_position
SELECT max(position) FROM lease_events;

-- name: append
INSERT INTO lease_events (position, aggregate, version, topic, state)
VALUES (:position, :aggregate, :version, :topic, :state);

-- name: events
SELECT aggregate, version, topic, state FROM lease_events
WHERE aggregate = :aggregate AND version > :gt AND version <= :lte ORDER BY version LIMIT :limit;

-- name: events_descending
SELECT aggregate, version, topic, state FROM lease_events
WHERE aggregate = :aggregate AND version > :gt AND version <= :lte ORDER BY version DESC LIMIT :limit;

-- name: notifications
SELECT aggregate, version, topic, state, position FROM lease_events
WHERE position > :after AND position <= :stop
    AND (:topics = '[]' OR topic IN (SELECT value FROM json_each(:topics)))
ORDER BY position LIMIT :limit;

-- name: remove_old_events
DELETE FROM lease_events AS old
WHERE EXISTS (
    SELECT 1 FROM lease_events AS new WHERE new.aggregate = old.aggregate AND new.version > old.version
        AND (instr(old.topic, :renewal) > 0 OR instr(new.topic, :renewal) = 0)
);

-- name: cursor
SELECT position FROM lease_cursor WHERE id = 1;

-- name: move_cursor
UPDATE lease_cursor SET position = :position WHERE id = 1;

-- name: put_lease
INSERT INTO mailbox_leases (
    mailbox_id, runner_id, proxy_id, partition, lease_expires, last_heartbeat, address, status, created_at, updated_at
)
VALUES (
    :mailbox, :runner, :proxy, :partition, :expires, :heartbeat, :address, :status, :created, :updated
)
ON CONFLICT (mailbox_id) DO UPDATE SET
    runner_id = excluded.runner_id,
    proxy_id = excluded.proxy_id,
    partition = excluded.partition,
    lease_expires = excluded.lease_expires,
    last_heartbeat = excluded.last_heartbeat,
    address = excluded.address,
    status = excluded.status,
    created_at = excluded.created_at,
    updated_at = excluded.updated_at;

-- name: put_route
INSERT INTO mailbox_routes (mailbox_id, proxy_id, runner_id, address, partition, created_at, updated_at)
VALUES (:mailbox, :proxy, :runner, :address, :partition, :acquired, :acquired)
ON CONFLICT (mailbox_id) DO UPDATE SET
    proxy_id = excluded.proxy_id,
    runner_id = excluded.runner_id,
    address = excluded.address,
    partition = excluded.partition,
    updated_at = excluded.updated_at;

-- name: remove_route
DELETE FROM mailbox_routes WHERE mailbox_id = :mailbox;

-- name: remove_lease
DELETE FROM mailbox_leases WHERE mailbox_id = :mailbox;

-- name: mark_expiring
UPDATE mailbox_leases SET status = 'expiring', updated_at = :now WHERE status = 'active' AND lease_expires <= :now;

-- name: clear_routes
DELETE FROM mailbox_routes;

-- name: clear_leases
DELETE FROM mailbox_leases;
