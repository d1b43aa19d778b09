-- Statements of the owners' addresses.

-- name: announce
INSERT INTO postroom.mailbox_owner (mailbox, session, address, certificate)
VALUES (%(mailbox)s, pg_backend_pid(), %(address)s, %(certificate)s)
ON CONFLICT (mailbox) DO UPDATE
SET session = excluded.session, address = excluded.address, certificate = excluded.certificate;

-- name: lock_and_announce
WITH lock AS (SELECT pg_try_advisory_lock(hashtextextended('postroom mailbox ' || %(mailbox)s, 0)) AS is_held)
INSERT INTO postroom.mailbox_owner (mailbox, session, address, certificate)
SELECT %(mailbox)s, pg_backend_pid(), %(address)s, %(certificate)s FROM lock WHERE is_held
ON CONFLICT (mailbox) DO UPDATE
SET session = excluded.session, address = excluded.address, certificate = excluded.certificate
RETURNING true;

-- name: find
WITH key AS (SELECT hashtextextended('postroom mailbox ' || %(mailbox)s, 0) AS value)
SELECT address, certificate FROM key, pg_locks, postroom.mailbox_owner
WHERE locktype = 'advisory' AND granted AND objsubid = 1
    AND classid::bigint = (value >> 32) & 4294967295 AND objid::bigint = value & 4294967295
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    AND mailbox = %(mailbox)s AND session = pid;

-- name: owners
SELECT mailbox, coalesce(application_name, ''), address
FROM postroom.mailbox_owner
CROSS JOIN LATERAL (SELECT hashtextextended('postroom mailbox ' || mailbox, 0) AS value) AS key
JOIN pg_locks ON session = pid AND locktype = 'advisory' AND granted AND objsubid = 1
    AND classid::bigint = (value >> 32) & 4294967295 AND objid::bigint = value & 4294967295
    AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
JOIN pg_stat_activity USING (pid)
ORDER BY mailbox LIMIT %(limit)s;

-- name: issue_ticket
WITH forgotten AS (
    DELETE FROM postroom.owner_ticket WHERE issued_at < now() - make_interval(secs => %(seconds)s)
)
INSERT INTO postroom.owner_ticket (hash, mailbox) VALUES (%(hash)s, %(mailbox)s);

-- name: redeem_ticket
DELETE FROM postroom.owner_ticket
WHERE hash = %(hash)s AND mailbox = %(mailbox)s AND issued_at >= now() - make_interval(secs => %(seconds)s)
RETURNING true;
