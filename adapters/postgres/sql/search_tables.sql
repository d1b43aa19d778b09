-- The tables of messages and for searching them, created before the load (see `postroom.projections.search_text`).

CREATE TABLE postroom.mailbox_v{version} (
    -- In the order of their sizes, so that no bytes are lost to alignment.
    id              BIGINT NOT NULL,
    timestamp       BIGINT NOT NULL,
    created_at      BIGINT NOT NULL,
    position        BIGINT NOT NULL,
    changed_at      BIGINT NOT NULL,
    due             BIGINT,
    shard           BIGINT NOT NULL,
    attempts        BIGINT NOT NULL,
    redriven        BIGINT NOT NULL,
    stream          BYTEA NOT NULL,
    -- NULL if it is the stream id as a UUID.
    message_id      TEXT COLLATE "C",
    topic           TEXT COLLATE "C" NOT NULL,
    content_type    TEXT COLLATE "C",
    schema_url      TEXT COLLATE "C",
    schema_version  TEXT COLLATE "C",
    encryption      TEXT COLLATE "C",
    correlation_id  TEXT COLLATE "C",
    principal       TEXT COLLATE "C",
    namespace       TEXT COLLATE "C",
    trace_id        TEXT COLLATE "C",
    span_id         TEXT COLLATE "C",
    custom_headers  TEXT COLLATE "C",
    mailbox         TEXT COLLATE "C" NOT NULL,
    status          TEXT COLLATE "C" NOT NULL,
    dead_letterings TEXT COLLATE "C"
) WITH (autovacuum_enabled = false);

-- The names of custom headers.
CREATE TABLE postroom.header_v{version} (
    name TEXT COLLATE "C" NOT NULL
) WITH (autovacuum_enabled = false);

-- All topics, against which globs are matched.
CREATE TABLE postroom.topic_v{version} (
    topic           TEXT COLLATE "C" NOT NULL,
    messages        BIGINT NOT NULL,
    first_timestamp BIGINT NOT NULL,
    last_timestamp  BIGINT NOT NULL
) WITH (autovacuum_enabled = false);

-- The searchable text without plain ids, and the words, each between blanks.
CREATE TABLE postroom.text_v{version} (
    id    BIGINT NOT NULL,
    text  TEXT COLLATE "C" NOT NULL,
    words TEXT COLLATE "C" NOT NULL
) WITH (autovacuum_enabled = false);
