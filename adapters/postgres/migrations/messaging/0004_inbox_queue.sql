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
    retry_at  TIMESTAMPTZ
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
