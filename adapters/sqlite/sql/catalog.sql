-- The catalog of the read-model file: one row for each version. Version numbers are never reused.

CREATE TABLE IF NOT EXISTS projection (
    version     INTEGER PRIMARY KEY AUTOINCREMENT,
    status      TEXT NOT NULL CHECK (status IN ('building', 'active', 'retired', 'failed', 'dropped')),
    owner       TEXT NOT NULL,
    started_at  INTEGER NOT NULL,
    finished_at INTEGER,
    cuts        TEXT NOT NULL,
    counts      TEXT,
    seconds     TEXT,
    error       TEXT,
    -- The plan of a version (`projections/plan.py`), and the version whose table each of its models uses: both JSON,
    -- NULL for versions of earlier releases.
    plan        TEXT,
    models      TEXT
) STRICT;

CREATE UNIQUE INDEX IF NOT EXISTS projection_active ON projection (status) WHERE status = 'active';

-- The cursor of a complete version: the log time (µs) and position of the last record applied from each mailbox, and its
-- position with the chain hash of its commit (`12:c0ffee...`): an earlier release moves the cursor without it.
CREATE TABLE IF NOT EXISTS projection_cursor (
    version    INTEGER NOT NULL,
    mailbox_id INTEGER NOT NULL,
    mailbox    TEXT NOT NULL,
    position   INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    chain      TEXT,
    PRIMARY KEY (version, mailbox_id)
) STRICT, WITHOUT ROWID;

-- The loaded parts of a version under construction, inserted in the transaction of their rows.
CREATE TABLE IF NOT EXISTS projection_part (
    version   INTEGER NOT NULL,
    part      TEXT NOT NULL,
    rows      INTEGER NOT NULL,
    folded_at INTEGER NOT NULL,
    PRIMARY KEY (version, part)
) STRICT, WITHOUT ROWID;

-- Records that could not be folded.
CREATE TABLE IF NOT EXISTS projection_parked (
    version   INTEGER NOT NULL,
    place     INTEGER NOT NULL,
    mailbox   TEXT NOT NULL,
    position  INTEGER NOT NULL,
    type      TEXT NOT NULL,
    error     TEXT NOT NULL,
    parked_at INTEGER NOT NULL,
    PRIMARY KEY (version, place)
) STRICT, WITHOUT ROWID;

-- The backlog of each context's outbox and inbox (SDS-047 QRY-050, QRY-051) at its last count.
CREATE TABLE IF NOT EXISTS context_backlog (
    context   TEXT NOT NULL,
    box       TEXT NOT NULL CHECK (box IN ('outbox', 'inbox')),
    count     INTEGER NOT NULL,
    parked    INTEGER NOT NULL,
    oldest_at INTEGER,
    as_of     INTEGER NOT NULL,
    PRIMARY KEY (context, box)
) STRICT, WITHOUT ROWID;
