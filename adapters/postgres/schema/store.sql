-- The event log of every mailbox of this store. Commits are only ever inserted, until retention removes whole ranges.

DO $$
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE 'a store needs a database that was created with ENCODING ''UTF8''';
    END IF;
END $$;

-- `removed_through` is the last position that retention removed, the end of a commit: nobody may append there again.
-- `id` leaves room for 2^40 positions each in a bigint.
CREATE TABLE postroom.mailbox_names (
    id                  BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY CHECK (id < 8388608),
    name                TEXT NOT NULL UNIQUE,
    partition_positions BIGINT NOT NULL CHECK (partition_positions > 0),
    removed_through     BIGINT NOT NULL DEFAULT 0
);

-- A row is a commit: the events at the positions up to `last`. `place` is mailbox id * 2^40 + its first position: one
-- key keeps each mailbox's commits together and in order. `events` and `envelopes` are compressed by who writes them.
-- A partition holds the commits that begin at `partition_positions` positions of one mailbox, so that retention drops
-- it whole. There is no default partition: one more is attached without a look at the rows of the others, and without
-- waiting for appends.
CREATE TABLE postroom.log (
    place     BIGINT NOT NULL,
    last      BIGINT NOT NULL,
    epoch     BIGINT NOT NULL,
    at        BIGINT NOT NULL,
    chain     BYTEA NOT NULL,
    events    BYTEA NOT NULL,
    envelopes BYTEA NOT NULL,
    PRIMARY KEY (place) WITH (fillfactor = 100)
) PARTITION BY RANGE (place);

ALTER TABLE postroom.log ALTER COLUMN events SET STORAGE EXTERNAL, ALTER COLUMN envelopes SET STORAGE EXTERNAL;

-- Where the events of a stream are: `place` is mailbox id * 2^40 + position of the event. A row without a version is
-- that of a message's last event, which is far from the first; the newest counts. So rows are never updated. Each
-- partition has a unique index on stream and version.
CREATE TABLE postroom.log_index (
    place   BIGINT NOT NULL,
    version BIGINT,
    stream  UUID NOT NULL
) PARTITION BY RANGE (place);

CREATE TABLE postroom.snapshot (
    place BIGINT PRIMARY KEY,
    chain BYTEA NOT NULL,
    state BYTEA NOT NULL
);

ALTER TABLE postroom.snapshot ALTER COLUMN state SET STORAGE EXTERNAL;

-- Where each mailbox's log ended when its owner last left.
CREATE TABLE postroom.seal (
    base     BIGINT PRIMARY KEY,
    position BIGINT NOT NULL,
    chain    BYTEA NOT NULL
);

-- Make what partitions a mailbox lacks to hold positions up to `through`; return the last position they hold.
-- It runs with the rights of whoever migrated: who appends needs none to create tables.
CREATE FUNCTION postroom.make_partitions(mailbox BIGINT, through BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '5s'
AS $$
DECLARE
    start CONSTANT BIGINT := mailbox << 40;
    size BIGINT;
    removed BIGINT;
    number BIGINT;
    partition TEXT;
    entries TEXT;
    bounds TEXT;
BEGIN
    IF through >= 1::bigint << 40 THEN
        RAISE 'a mailbox holds fewer than 2^40 positions; position % was asked for', through;
    END IF;
    PERFORM pg_advisory_xact_lock(hashtextextended('postroom partitions', mailbox));
    SELECT partition_positions, removed_through INTO STRICT size, removed
    FROM postroom.mailbox_names WHERE id = mailbox;
    -- What retention dropped is not made again.
    FOR number IN SELECT generate_series(removed / size, (through - 1) / size) LOOP
        partition := format('log_%s_%s', mailbox, number);
        entries := format('log_index_%s_%s', mailbox, number);
        bounds := format('FROM (%s) TO (%s)', start + number * size + 1, start + (number + 1) * size + 1);
        CONTINUE WHEN to_regclass('postroom.' || partition) IS NOT NULL;
        -- Rows stay as they are: they are vacuumed and frozen a few times while the partition fills.
        EXECUTE format(
            'CREATE TABLE postroom.%I (LIKE postroom.log INCLUDING ALL) WITH (autovacuum_freeze_min_age = 0,'
            ' autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = %s,'
            ' toast.autovacuum_freeze_min_age = 0, toast.autovacuum_vacuum_insert_scale_factor = 0,'
            ' toast.autovacuum_vacuum_insert_threshold = %s)',
            partition, least(size / 64 + 100, 2000000000), least(size / 8 + 100, 2000000000));
        EXECUTE format(
            'CREATE TABLE postroom.%I (LIKE postroom.log_index) WITH (autovacuum_freeze_min_age = 0,'
            ' autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = %s)',
            entries, least(size / 8 + 100, 2000000000));
        EXECUTE format('CREATE UNIQUE INDEX ON postroom.%I (stream, version)', entries);
        EXECUTE format('ALTER TABLE postroom.log ATTACH PARTITION postroom.%I FOR VALUES %s', partition, bounds);
        EXECUTE format('ALTER TABLE postroom.log_index ATTACH PARTITION postroom.%I FOR VALUES %s', entries, bounds);
    END LOOP;
    RETURN ((through - 1) / size + 1) * size;
END $$;

-- Drop the partitions of a mailbox of which retention removed every position; return the last position dropped, or 0.
-- Every commit that begins in them ends at or before `removed_through`.
-- A transaction that looks at the log is waited for only shortly, as appends would wait behind; next time, then.
CREATE FUNCTION postroom.drop_partitions(mailbox BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp
SET lock_timeout = '50ms'
AS $$
DECLARE
    size BIGINT;
    removed BIGINT;
    number BIGINT;
    partition TEXT;
    dropped BIGINT := 0;
BEGIN
    SELECT partition_positions, removed_through INTO STRICT size, removed
    FROM postroom.mailbox_names WHERE id = mailbox;
    FOR number IN SELECT generate_series(0, removed / size - 1) LOOP
        partition := format('log_%s_%s', mailbox, number);
        CONTINUE WHEN to_regclass('postroom.' || partition) IS NULL;
        EXECUTE format('DROP TABLE postroom.%I, postroom.%I', partition, format('log_index_%s_%s', mailbox, number));
        dropped := (number + 1) * size;
    END LOOP;
    RETURN dropped;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END $$;

REVOKE ALL ON FUNCTION postroom.make_partitions, postroom.drop_partitions FROM PUBLIC;

-- The read models that a rebuild makes from the log; the tables of each version are made by the rebuild itself.

-- One row for each version that was ever built. Versions are never used again.
CREATE TABLE postroom.projection (
    version     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    status      TEXT NOT NULL CHECK (status IN ('building', 'active', 'retired', 'failed', 'dropped')),
    owner       TEXT NOT NULL,
    started_at  BIGINT NOT NULL,
    finished_at BIGINT,
    cuts        TEXT NOT NULL,
    counts      TEXT,
    seconds     TEXT,
    error       TEXT,
    -- What a version is built from (`projections/sinks`), and which version's table each of its models is in: both
    -- JSON, null where an earlier release built it.
    plan        TEXT,
    models      TEXT
);

CREATE UNIQUE INDEX projection_active ON postroom.projection (status) WHERE status = 'active';

-- How far a version that is complete has come: the log time (µs) and the position of each mailbox's last record, and that
-- position with the chain hash of its commit in hex (`12:c0ffee...`), unless an earlier release moved the cursor.
CREATE TABLE postroom.projection_cursor (
    version    BIGINT NOT NULL,
    mailbox_id BIGINT NOT NULL,
    mailbox    TEXT COLLATE "C" NOT NULL,
    position   BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    chain      TEXT COLLATE "C",
    PRIMARY KEY (version, mailbox_id)
);

-- Which parts of a version that is being built were written, in the transaction of their rows.
CREATE TABLE postroom.projection_part (
    version   BIGINT NOT NULL,
    part      TEXT COLLATE "C" NOT NULL,
    rows      BIGINT NOT NULL,
    folded_at BIGINT NOT NULL,
    PRIMARY KEY (version, part)
);

-- Records that could not be folded and were left out.
CREATE TABLE postroom.projection_parked (
    version   BIGINT NOT NULL,
    place     BIGINT NOT NULL,
    mailbox   TEXT COLLATE "C" NOT NULL,
    position  BIGINT NOT NULL,
    type      TEXT COLLATE "C" NOT NULL,
    error     TEXT COLLATE "C" NOT NULL,
    parked_at BIGINT NOT NULL,
    PRIMARY KEY (version, place)
);

-- What waits in the outbox and the inbox of each context (SDS-047 QRY-050, QRY-051), as it was counted last.
CREATE TABLE postroom.context_backlog (
    context   TEXT COLLATE "C" NOT NULL,
    box       TEXT COLLATE "C" NOT NULL CHECK (box IN ('outbox', 'inbox')),
    count     BIGINT NOT NULL,
    parked    BIGINT NOT NULL,
    oldest_at BIGINT,
    as_of     BIGINT NOT NULL,
    PRIMARY KEY (context, box)
);

-- The address and the certificate of an owner. A row counts while the session that wrote it has the mailbox's lock.
-- Unlogged: it means nothing on a replica or in a backup, and a crash of the server ends all sessions anyway.
CREATE UNLOGGED TABLE postroom.mailbox_owner (
    mailbox     TEXT COLLATE "C" PRIMARY KEY,
    session     INT NOT NULL,
    address     TEXT NOT NULL,
    certificate TEXT NOT NULL
);

-- SHA-256 of the tickets that callers have issued to themselves: who may write here may call the owner. The owner
-- deletes a ticket when it admits its bearer.
CREATE UNLOGGED TABLE postroom.owner_ticket (
    hash      BYTEA PRIMARY KEY,
    mailbox   TEXT COLLATE "C" NOT NULL,
    issued_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);

-- Free text is found without it too, but not as quickly: a rebuild makes its index where the extension is there.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_trgm' AND installed_version IS NULL)
        AND has_database_privilege(current_database(), 'CREATE')
    THEN
        CREATE EXTENSION pg_trgm SCHEMA postroom;
    END IF;
END $$;
