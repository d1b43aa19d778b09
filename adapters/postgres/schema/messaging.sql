-- Outbox and inbox of one bounded context, in its own database (SDS-047 section 9).

-- SDS-047's columns, and one more: the order in which events were recorded. `occurred_at` and `id` come from the
-- clocks of several machines and can't tell which of two events of an aggregate was the first.
CREATE TABLE outbox_events (
    id               UUID PRIMARY KEY,
    aggregate_type   TEXT NOT NULL,
    aggregate_id     TEXT NOT NULL,
    event_type       TEXT NOT NULL,
    event_version    INT NOT NULL DEFAULT 1,
    payload          JSONB NOT NULL,
    occurred_at      TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    correlation_id   UUID,
    causation_id     UUID,
    published_at     TIMESTAMPTZ,
    publish_attempts INT NOT NULL DEFAULT 0,
    publish_error    TEXT,
    position         BIGINT NOT NULL GENERATED ALWAYS AS IDENTITY,

    CONSTRAINT chk_occurred_not_future CHECK (occurred_at <= NOW() + INTERVAL '1 minute')
);

CREATE INDEX idx_outbox_unpublished ON outbox_events (occurred_at) WHERE published_at IS NULL;
CREATE INDEX idx_outbox_correlation ON outbox_events (correlation_id);
CREATE INDEX idx_outbox_order ON outbox_events (position) WHERE published_at IS NULL;
CREATE INDEX idx_outbox_published ON outbox_events (published_at) WHERE published_at IS NOT NULL;

-- Only what failed has a row here: when to try it again, or never (parked) where that is NULL. It holds back the
-- later events of its aggregate.
CREATE TABLE outbox_retries (
    id             UUID PRIMARY KEY,
    aggregate_type TEXT NOT NULL,
    aggregate_id   TEXT NOT NULL,
    position       BIGINT NOT NULL,
    retry_at       TIMESTAMPTZ
);

CREATE INDEX idx_outbox_retries_aggregate ON outbox_retries (hashtextextended(aggregate_type || '/' || aggregate_id, 0));

-- SDS-047's columns, and two more: the length of its history, and since when it is a dead letter.
CREATE TABLE inbox_messages (
    message_id       UUID PRIMARY KEY,
    subject          TEXT NOT NULL,
    received_at      TIMESTAMPTZ NOT NULL DEFAULT NOW(),
    processed_at     TIMESTAMPTZ,
    attempts         INT NOT NULL DEFAULT 0,
    last_error       TEXT,
    version          INT NOT NULL DEFAULT 0,
    dead_lettered_at TIMESTAMPTZ,

    CONSTRAINT chk_inbox_processed_after_received CHECK (processed_at >= received_at)
);

CREATE INDEX idx_inbox_unprocessed ON inbox_messages (received_at) WHERE processed_at IS NULL;
CREATE INDEX idx_inbox_processed ON inbox_messages (processed_at) WHERE processed_at IS NOT NULL;

-- The history of both kinds of aggregate; `stream` is the outbox event's id, or one that goes with the inbox
-- message's.
CREATE TABLE aggregate_events (
    stream  UUID NOT NULL,
    version INT NOT NULL,
    type    TEXT NOT NULL,
    at      TIMESTAMPTZ NOT NULL,
    state   BYTEA NOT NULL,
    PRIMARY KEY (stream, version)
);

-- Messages that transactions recorded for a mailbox; its owner sends and deletes them. A refused one keeps its error.
CREATE TABLE outbox_messages (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id       TEXT NOT NULL,
    mailbox  TEXT NOT NULL,
    topic    TEXT NOT NULL,
    message  TEXT NOT NULL,
    error    TEXT
);

-- Messages that ordered workers took from a stream and have not settled. Rows are added in the order of the stream,
-- under the lock of the consumer's row in `inbox_readers`, so `position` has that order. A `lane` is the hash of an
-- aggregate; `message` is the msgpack of subject, headers and data.
CREATE TABLE inbox_queue (
    position  BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer  TEXT NOT NULL,
    partition INT NOT NULL,
    lane      BIGINT NOT NULL,
    sequence  BIGINT NOT NULL,
    message   BYTEA NOT NULL,
    failures  INT NOT NULL DEFAULT 0,
    retry_at  TIMESTAMPTZ,
    added_at  TIMESTAMPTZ NOT NULL DEFAULT now()
);

CREATE INDEX idx_inbox_queue_partition ON inbox_queue (consumer, partition, position);
CREATE INDEX idx_inbox_queue_retry ON inbox_queue (consumer, lane, position) WHERE retry_at IS NOT NULL;

-- How far each consumer's stream is in the queue, and which worker reads it until when. A stream or consumer that was
-- created anew has another incarnation.
CREATE TABLE inbox_readers (
    consumer    TEXT PRIMARY KEY,
    incarnation TEXT NOT NULL,
    sequence    BIGINT NOT NULL,
    worker      UUID,
    turn_ends   TIMESTAMPTZ
);

-- The ordered workers of each consumer, and the owners of its partitions; the epoch grows with every change of owner.
CREATE TABLE inbox_workers (
    consumer   TEXT NOT NULL,
    worker     UUID NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (consumer, worker)
);

CREATE TABLE inbox_partitions (
    consumer  TEXT NOT NULL,
    partition INT NOT NULL,
    worker    UUID,
    epoch     BIGINT NOT NULL DEFAULT 0,
    PRIMARY KEY (consumer, partition)
);

-- Owners and relays that wait are notified of what is recorded (ADR 0138). An advisory lock tells that one waits, so that
-- PostgreSQL serialises the commits of no others: 100 is a key beside the numbers of partitions.
CREATE FUNCTION outbox_notify_listeners() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify(TG_ARGV[0], CAST(TG_TABLE_SCHEMA AS text));
    RETURN NULL;
END
$$;

CREATE TRIGGER notify_listeners AFTER INSERT ON outbox_events
    WHEN (NOT pg_try_advisory_xact_lock_shared(CAST(CAST('outbox_events' AS regclass) AS oid)::int, 100))
    EXECUTE FUNCTION outbox_notify_listeners('postroom_outbox');
CREATE TRIGGER notify_listeners AFTER INSERT OR UPDATE ON outbox_messages
    WHEN (NOT pg_try_advisory_xact_lock_shared(CAST(CAST('outbox_messages' AS regclass) AS oid)::int, 100))
    EXECUTE FUNCTION outbox_notify_listeners('postroom_outbox_messages');
