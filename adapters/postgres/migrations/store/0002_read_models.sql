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
    error       TEXT
);

CREATE UNIQUE INDEX projection_active ON postroom.projection (status) WHERE status = 'active';

-- Free text is found without it too, but not as quickly: a rebuild makes its index where the extension is there.
DO $$
BEGIN
    IF EXISTS (SELECT FROM pg_available_extensions WHERE name = 'pg_trgm' AND installed_version IS NULL)
        AND has_database_privilege(current_database(), 'CREATE')
    THEN
        CREATE EXTENSION pg_trgm SCHEMA postroom;
    END IF;
END $$;
