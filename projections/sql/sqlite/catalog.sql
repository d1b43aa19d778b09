-- What is in the read-model file: one row for each version that was ever built. Versions are never used again.

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
    -- What a version is built from (`projections/sinks`), and which version's table each of its models is in: both
    -- JSON, null where an earlier release built it.
    plan        TEXT,
    models      TEXT
) STRICT;

CREATE UNIQUE INDEX IF NOT EXISTS projection_active ON projection (status) WHERE status = 'active';

-- How far a version that is complete has come: the log time (µs) and the position of each mailbox's last record.
CREATE TABLE IF NOT EXISTS projection_cursor (
    version    INTEGER NOT NULL,
    mailbox_id INTEGER NOT NULL,
    mailbox    TEXT NOT NULL,
    position   INTEGER NOT NULL,
    at         INTEGER NOT NULL,
    PRIMARY KEY (version, mailbox_id)
) STRICT, WITHOUT ROWID;

-- Which parts of a version that is being built were loaded, in the transaction of their rows.
CREATE TABLE IF NOT EXISTS projection_part (
    version   INTEGER NOT NULL,
    part      TEXT NOT NULL,
    rows      INTEGER NOT NULL,
    folded_at INTEGER NOT NULL,
    PRIMARY KEY (version, part)
) STRICT, WITHOUT ROWID;

-- Records that could not be folded and were left out.
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

-- What waits in the outbox and the inbox of each context (SDS-047 QRY-050, QRY-051), as it was counted last.
CREATE TABLE IF NOT EXISTS context_backlog (
    context   TEXT NOT NULL,
    box       TEXT NOT NULL CHECK (box IN ('outbox', 'inbox')),
    count     INTEGER NOT NULL,
    parked    INTEGER NOT NULL,
    oldest_at INTEGER,
    as_of     INTEGER NOT NULL,
    PRIMARY KEY (context, box)
) STRICT, WITHOUT ROWID;
