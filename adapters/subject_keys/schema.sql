PRAGMA journal_mode = DELETE; -- a write-ahead log would retain destroyed keys

CREATE TABLE master_key (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    key_id TEXT NOT NULL
) STRICT;

-- A destroyed subject keeps its row, so that its messages are known to be erased.
CREATE TABLE subjects (
    number INTEGER PRIMARY KEY,
    pseudonym TEXT NOT NULL UNIQUE,
    blind_index BLOB, -- of its name; NULL once the erasure is recorded
    data_key BLOB, -- encrypted by the master key; NULL once it is destroyed
    created_at INTEGER NOT NULL, -- µs since 1970 UTC
    erased_at INTEGER
) STRICT;

CREATE UNIQUE INDEX subjects_with_key ON subjects (blind_index) WHERE data_key IS NOT NULL;
