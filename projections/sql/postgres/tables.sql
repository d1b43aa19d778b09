-- The tables of one version, before the load; {version} is its number. The column comments are in projections/rows.py.
-- Text is compared byte by byte, as it is in the log; nothing is vacuumed before it is complete.

-- RFC-037's `mailbox` table.
CREATE TABLE postroom.mailbox_v{version} (
    id             BIGINT NOT NULL,
    message_id     TEXT COLLATE "C" NOT NULL,
    timestamp      BIGINT NOT NULL,
    topic          TEXT COLLATE "C" NOT NULL,
    content_type   TEXT COLLATE "C",
    schema_url     TEXT COLLATE "C",
    schema_version TEXT COLLATE "C",
    encryption     TEXT COLLATE "C",
    correlation_id TEXT COLLATE "C",
    principal      TEXT COLLATE "C",
    namespace      TEXT COLLATE "C",
    trace_id       TEXT COLLATE "C",
    span_id        TEXT COLLATE "C",
    custom_headers TEXT COLLATE "C",
    created_at     BIGINT NOT NULL,
    mailbox        TEXT COLLATE "C" NOT NULL,
    position       BIGINT NOT NULL,
    shard          BIGINT NOT NULL,
    status         TEXT COLLATE "C" NOT NULL,
    attempts       BIGINT NOT NULL,
    redriven       BIGINT NOT NULL,
    changed_at     BIGINT NOT NULL,
    envelope_blob  BYTEA NOT NULL
) WITH (autovacuum_enabled = false);

CREATE TABLE postroom.backlog_v{version} (
    mailbox   TEXT COLLATE "C" NOT NULL,
    topic     TEXT COLLATE "C" NOT NULL,
    shard     BIGINT NOT NULL,
    ready     BIGINT NOT NULL,
    in_flight BIGINT NOT NULL,
    delayed   BIGINT NOT NULL,
    dead      BIGINT NOT NULL,
    oldest_at BIGINT
) WITH (autovacuum_enabled = false);

CREATE TABLE postroom.dead_letters_v{version} (
    id          BIGINT NOT NULL,
    mailbox     TEXT COLLATE "C" NOT NULL,
    topic       TEXT COLLATE "C" NOT NULL,
    shard       BIGINT NOT NULL,
    message_id  TEXT COLLATE "C" NOT NULL,
    reason      TEXT COLLATE "C" NOT NULL,
    attempt     BIGINT NOT NULL,
    last_error  TEXT COLLATE "C",
    fingerprint TEXT COLLATE "C" NOT NULL,
    first_seen  BIGINT NOT NULL,
    last_seen   BIGINT NOT NULL,
    redriven    BIGINT NOT NULL,
    redriven_at BIGINT
) WITH (autovacuum_enabled = false);
