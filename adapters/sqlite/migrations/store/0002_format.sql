-- The format of the store, which programs check before they use it (ADR 0101).

CREATE TABLE store_format (
    id      INTEGER PRIMARY KEY CHECK (id = 1),
    format  INTEGER NOT NULL,
    version TEXT NOT NULL
) STRICT;
