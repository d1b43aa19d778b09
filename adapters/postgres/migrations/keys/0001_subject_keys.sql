-- The data keys of subjects, apart from the log.

CREATE TABLE postroom_keys.master_key (
    one    INT PRIMARY KEY CHECK (one = 1),
    key_id TEXT NOT NULL
);

-- Rows are only inserted, never updated: an update would leave the old row, with a destroyed key, in the file until
-- other rows overwrite it. To destroy a key, the table is rewritten into a new file. A destroyed subject keeps its row,
-- so that its messages are known to be erased.
CREATE TABLE postroom_keys.subjects (
    number      BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pseudonym   TEXT COLLATE "C" NOT NULL UNIQUE,
    blind_index BYTEA, -- of its name; NULL once the erasure is recorded
    data_key    BYTEA, -- encrypted by the master key; NULL once it is destroyed
    created_at  BIGINT NOT NULL, -- µs since 1970 UTC
    erased_at   BIGINT
);

CREATE UNIQUE INDEX subjects_with_key ON postroom_keys.subjects (blind_index) WHERE data_key IS NOT NULL;
CREATE INDEX subjects_pending ON postroom_keys.subjects (blind_index) WHERE data_key IS NULL;

-- Rewrites the table without the key of a subject, or without its blind index if the key was destroyed before. The old
-- file is gone with the commit, also for transactions that began earlier. It is one statement, so that a client that
-- is paused blocks nobody. Returns whether the subject exists.
CREATE FUNCTION postroom_keys.rewrite_subjects(subject TEXT, destroyed_at BIGINT)
RETURNS BOOLEAN
LANGUAGE plpgsql
SET search_path = pg_catalog, pg_temp
AS $$
DECLARE
    has_key BOOLEAN;
BEGIN
    LOCK TABLE postroom_keys.subjects IN ACCESS EXCLUSIVE MODE;
    SELECT data_key IS NOT NULL INTO has_key FROM postroom_keys.subjects WHERE pseudonym = subject;
    IF has_key IS DISTINCT FROM (destroyed_at IS NOT NULL) THEN
        RETURN has_key IS NOT NULL;
    END IF;
    CREATE TEMPORARY TABLE postroom_subjects AS TABLE postroom_keys.subjects;
    TRUNCATE postroom_keys.subjects;
    INSERT INTO postroom_keys.subjects (number, pseudonym, blind_index, data_key, created_at, erased_at)
    OVERRIDING SYSTEM VALUE
    SELECT
        number, pseudonym,
        CASE WHEN pseudonym <> subject OR has_key THEN blind_index END,
        CASE WHEN pseudonym <> subject THEN data_key END,
        created_at,
        CASE WHEN pseudonym = subject AND has_key THEN destroyed_at ELSE erased_at END
    FROM pg_temp.postroom_subjects ORDER BY number;
    DROP TABLE pg_temp.postroom_subjects;
    RETURN true;
END $$;
