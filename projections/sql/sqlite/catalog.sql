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
    error       TEXT
) STRICT;

CREATE UNIQUE INDEX IF NOT EXISTS projection_active ON projection (status) WHERE status = 'active';
