-- The log of leases, and the read models that are folded from it. Events are inserted, never updated; those that no
-- fold needs are deleted, but never the last one of all, so positions are not used twice.

CREATE TABLE IF NOT EXISTS lease_events (
    position  INTEGER PRIMARY KEY,
    aggregate BLOB NOT NULL,
    version   INTEGER NOT NULL,
    topic     TEXT NOT NULL,
    state     BLOB NOT NULL
) STRICT;

CREATE UNIQUE INDEX IF NOT EXISTS lease_events_aggregate ON lease_events (aggregate, version);

-- RFC-049's tables. Times are in ms since 1970 UTC.
CREATE TABLE IF NOT EXISTS mailbox_leases (
    mailbox_id     TEXT PRIMARY KEY,
    runner_id      TEXT NOT NULL,
    proxy_id       TEXT NOT NULL,
    partition      INTEGER NOT NULL,
    lease_expires  INTEGER NOT NULL,
    last_heartbeat INTEGER NOT NULL,
    address        TEXT NOT NULL,
    status         TEXT NOT NULL,
    created_at     INTEGER NOT NULL,
    updated_at     INTEGER NOT NULL
);

CREATE INDEX IF NOT EXISTS idx_lease_expires ON mailbox_leases (lease_expires);
CREATE INDEX IF NOT EXISTS idx_status ON mailbox_leases (status);
CREATE INDEX IF NOT EXISTS idx_proxy_partition ON mailbox_leases (proxy_id, partition);

CREATE TABLE IF NOT EXISTS mailbox_routes (
    mailbox_id TEXT PRIMARY KEY,
    proxy_id   TEXT NOT NULL,
    runner_id  TEXT NOT NULL,
    address    TEXT NOT NULL,
    partition  INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL,

    FOREIGN KEY (mailbox_id) REFERENCES mailbox_leases (mailbox_id)
);

CREATE INDEX IF NOT EXISTS idx_proxy_id ON mailbox_routes (proxy_id);
CREATE INDEX IF NOT EXISTS idx_partition ON mailbox_routes (partition);

-- The position of the log up to which the tables are folded.
CREATE TABLE IF NOT EXISTS lease_cursor (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    position INTEGER NOT NULL
) STRICT;

INSERT OR IGNORE INTO lease_cursor (id, position) VALUES (1, 0);
