-- The log of leases, and the read models that are folded from it. Events are inserted, never updated; those that no
-- fold needs are deleted.

DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE 'a lease store needs a database that was created with ENCODING ''UTF8''';
    END IF;
END $$;

CREATE TABLE postroom.lease_events (
    position  BIGINT PRIMARY KEY,
    aggregate UUID NOT NULL,
    version   BIGINT NOT NULL,
    topic     TEXT COLLATE "C" NOT NULL,
    state     BYTEA NOT NULL
);

CREATE UNIQUE INDEX lease_events_aggregate ON postroom.lease_events (aggregate, version);

-- Appends events, all or none, and returns the position of the last. The lock makes events visible in the order of
-- their positions, and lasts for this statement only: a client that is paused between two statements blocks nobody.
-- The last event of all is never removed, so positions are not used twice.
CREATE FUNCTION postroom.append_lease_events(aggregates UUID[], versions BIGINT[], topics TEXT[], states BYTEA[])
RETURNS BIGINT
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    last BIGINT;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended('postroom lease_events', 0));
    IF EXISTS (
        SELECT FROM unnest(aggregates, versions) AS new (aggregate, version)
        WHERE new.version <= (
            SELECT max(old.version) FROM postroom.lease_events AS old WHERE old.aggregate = new.aggregate
        )
    ) THEN
        RAISE unique_violation USING MESSAGE = 'an aggregate has an event of the same or a later version';
    END IF;
    SELECT coalesce(max(position), 0) INTO last FROM postroom.lease_events;
    INSERT INTO postroom.lease_events (position, aggregate, version, topic, state)
    SELECT last + new.number, new.aggregate, new.version, new.topic, new.state
    FROM unnest(aggregates, versions, topics, states) WITH ORDINALITY AS new (aggregate, version, topic, state, number);
    RETURN last + cardinality(aggregates);
END $$;

-- RFC-049's tables. Times are in ms since 1970 UTC.
CREATE TABLE postroom.mailbox_leases (
    mailbox_id     TEXT COLLATE "C" PRIMARY KEY,
    runner_id      TEXT COLLATE "C" NOT NULL,
    proxy_id       TEXT COLLATE "C" NOT NULL,
    partition      INTEGER NOT NULL,
    lease_expires  BIGINT NOT NULL,
    last_heartbeat BIGINT NOT NULL,
    address        TEXT COLLATE "C" NOT NULL,
    status         TEXT COLLATE "C" NOT NULL,
    created_at     BIGINT NOT NULL,
    updated_at     BIGINT NOT NULL
);

CREATE INDEX idx_lease_expires ON postroom.mailbox_leases (lease_expires);
CREATE INDEX idx_status ON postroom.mailbox_leases (status);
CREATE INDEX idx_proxy_partition ON postroom.mailbox_leases (proxy_id, partition);

CREATE TABLE postroom.mailbox_routes (
    mailbox_id TEXT COLLATE "C" PRIMARY KEY,
    proxy_id   TEXT COLLATE "C" NOT NULL,
    runner_id  TEXT COLLATE "C" NOT NULL,
    address    TEXT COLLATE "C" NOT NULL,
    partition  INTEGER NOT NULL,
    created_at BIGINT NOT NULL,
    updated_at BIGINT NOT NULL,

    FOREIGN KEY (mailbox_id) REFERENCES postroom.mailbox_leases (mailbox_id)
);

CREATE INDEX idx_proxy_id ON postroom.mailbox_routes (proxy_id);
CREATE INDEX idx_partition ON postroom.mailbox_routes (partition);

-- The position of the log up to which the tables are folded.
CREATE TABLE postroom.lease_cursor (
    id       INTEGER PRIMARY KEY CHECK (id = 1),
    position BIGINT NOT NULL
);

INSERT INTO postroom.lease_cursor (id, position) VALUES (1, 0);
