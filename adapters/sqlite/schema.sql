-- The event log of every mailbox in this file. Commits are inserted, never updated; retention deletes ranges.

-- `removed_through` is the last position that retention removed; appends up to it are rejected.
CREATE TABLE IF NOT EXISTS mailbox_names (
    id              INTEGER PRIMARY KEY,
    name            TEXT NOT NULL UNIQUE,
    removed_through INTEGER NOT NULL DEFAULT 0
) STRICT;

-- A row is a commit: the events at the positions from `place - (mailbox id << 40)` to `last`. `place` is mailbox id *
-- 2^40 + first position: one integer key clusters the commits of a mailbox in order.
CREATE TABLE IF NOT EXISTS log (
    place     INTEGER PRIMARY KEY,
    last      INTEGER NOT NULL,
    epoch     INTEGER NOT NULL,
    at        INTEGER NOT NULL,
    chain     BLOB NOT NULL,
    events    BLOB NOT NULL,
    envelopes BLOB NOT NULL
) STRICT;

-- Where the events of a stream begin; `last` is the position of a message's last event if that is far away.
CREATE TABLE IF NOT EXISTS log_index (
    mailbox  INTEGER NOT NULL,
    stream   BLOB NOT NULL,
    version  INTEGER NOT NULL,
    position INTEGER NOT NULL,
    last     INTEGER,
    PRIMARY KEY (mailbox, stream, version)
) STRICT, WITHOUT ROWID;

CREATE TABLE IF NOT EXISTS snapshot (
    place INTEGER PRIMARY KEY,
    chain BLOB NOT NULL,
    state BLOB NOT NULL
) STRICT;

-- The end of each mailbox's log when its last owner closed it.
CREATE TABLE IF NOT EXISTS seal (
    base     INTEGER PRIMARY KEY,
    position INTEGER NOT NULL,
    chain    BLOB NOT NULL
) STRICT;

-- The format of this file, and the version of Postroom that wrote it first in that format.
CREATE TABLE IF NOT EXISTS store_format (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    format  INTEGER NOT NULL,
    version TEXT NOT NULL
) STRICT;
