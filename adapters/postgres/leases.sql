-- Statements of the PostgreSQL lease store.

-- name: append
SELECT postroom.append_lease_events(
    %(aggregates)s::uuid[], %(versions)s::bigint[], %(topics)s::text[], %(states)s::bytea[]
);

-- name: events
SELECT aggregate, version, topic, state FROM postroom.lease_events
WHERE aggregate = %(aggregate)s AND version > %(gt)s AND version <= %(lte)s ORDER BY version LIMIT %(limit)s;

-- name: events_descending
SELECT aggregate, version, topic, state FROM postroom.lease_events
WHERE aggregate = %(aggregate)s AND version > %(gt)s AND version <= %(lte)s ORDER BY version DESC LIMIT %(limit)s;

-- name: notifications
SELECT aggregate, version, topic, state, position FROM postroom.lease_events
WHERE position > %(after)s AND position <= %(stop)s
    AND (cardinality(%(topics)s::text[]) = 0 OR topic = ANY (%(topics)s::text[]))
ORDER BY position LIMIT %(limit)s;

-- name: last_position
SELECT max(position) FROM postroom.lease_events;

-- name: remove_old_events
DELETE FROM postroom.lease_events AS old
WHERE EXISTS (
    SELECT FROM postroom.lease_events AS new WHERE new.aggregate = old.aggregate AND new.version > old.version
        AND (strpos(old.topic, %(renewal)s) > 0 OR strpos(new.topic, %(renewal)s) = 0)
);

-- name: cursor
SELECT position FROM postroom.lease_cursor WHERE id = 1;

-- name: lock_cursor
SELECT position FROM postroom.lease_cursor WHERE id = 1 FOR UPDATE;

-- name: move_cursor
UPDATE postroom.lease_cursor SET position = %(position)s WHERE id = 1;

-- name: put_lease
INSERT INTO postroom.mailbox_leases (
    mailbox_id, runner_id, proxy_id, partition, lease_expires, last_heartbeat, address, status, created_at, updated_at
)
VALUES (
    %(mailbox)s, %(runner)s, %(proxy)s, %(partition)s, %(expires)s, %(heartbeat)s, %(address)s, %(status)s,
    %(created)s, %(updated)s
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
INSERT INTO postroom.mailbox_routes (mailbox_id, proxy_id, runner_id, address, partition, created_at, updated_at)
VALUES (%(mailbox)s, %(proxy)s, %(runner)s, %(address)s, %(partition)s, %(acquired)s, %(acquired)s)
ON CONFLICT (mailbox_id) DO UPDATE SET
    proxy_id = excluded.proxy_id,
    runner_id = excluded.runner_id,
    address = excluded.address,
    partition = excluded.partition,
    updated_at = excluded.updated_at;

-- name: remove_route
DELETE FROM postroom.mailbox_routes WHERE mailbox_id = %(mailbox)s;

-- name: remove_lease
DELETE FROM postroom.mailbox_leases WHERE mailbox_id = %(mailbox)s;

-- name: mark_expiring
UPDATE postroom.mailbox_leases SET status = 'expiring', updated_at = %(now)s
WHERE status = 'active' AND lease_expires <= %(now)s;

-- name: clear_routes
DELETE FROM postroom.mailbox_routes;

-- name: clear_leases
DELETE FROM postroom.mailbox_leases;
