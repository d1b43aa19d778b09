-- The tables for searching one version, created before the load (see `postroom.projections.search_text`).

-- Custom headers by name and value.
CREATE TABLE postroom.header_v{version} (
    name      TEXT COLLATE "C" NOT NULL,
    value     TEXT COLLATE "C" NOT NULL,
    timestamp BIGINT NOT NULL,
    id        BIGINT NOT NULL
) WITH (autovacuum_enabled = false);

-- All topics, against which globs are matched.
CREATE TABLE postroom.topic_v{version} (
    topic           TEXT COLLATE "C" NOT NULL,
    messages        BIGINT NOT NULL,
    first_timestamp BIGINT NOT NULL,
    last_timestamp  BIGINT NOT NULL
) WITH (autovacuum_enabled = false);

-- The searchable text, and its words, each between blanks.
CREATE TABLE postroom.text_v{version} (
    id    BIGINT NOT NULL,
    text  TEXT COLLATE "C" NOT NULL,
    words TEXT COLLATE "C" NOT NULL
) WITH (autovacuum_enabled = false);
