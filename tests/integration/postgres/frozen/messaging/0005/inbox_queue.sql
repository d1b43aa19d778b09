-- Statements of ordered workers. Each is a transaction of its own, so a worker that is paused between two has no locks.

-- name: add_partitions
INSERT INTO inbox_partitions (consumer, partition)
SELECT CAST(:consumer AS text), partition FROM generate_series(0, CAST(:partitions AS int) - 1) AS partition
ON CONFLICT DO NOTHING;

-- A server that was restored may deliver less than the queue has had: what it stores from now on would be missed.
-- name: open_reader
INSERT INTO inbox_readers AS reader (consumer, incarnation, sequence)
VALUES (:consumer, :incarnation, CAST(:floor AS bigint))
ON CONFLICT (consumer) DO UPDATE
SET incarnation = excluded.incarnation, sequence = excluded.sequence, worker = NULL
WHERE reader.incarnation <> excluded.incarnation OR reader.sequence > CAST(:delivered AS bigint);

-- name: take_turn
UPDATE inbox_readers AS reader
SET worker = CAST(:worker AS uuid), turn_ends = clock_timestamp() + CAST(:ms AS int) * interval '1 millisecond'
WHERE consumer = :consumer AND incarnation = :incarnation
  AND (worker IS NULL OR worker = CAST(:worker AS uuid) OR turn_ends <= clock_timestamp())
RETURNING sequence, (
    SELECT count(*) FROM (
        SELECT FROM inbox_queue AS queued WHERE queued.consumer = :consumer LIMIT CAST(:most AS int)
    ) AS counted
);

-- name: add
WITH turn AS (
    UPDATE inbox_readers SET sequence = CAST(:last AS bigint)
    WHERE consumer = :consumer AND incarnation = :incarnation AND sequence = CAST(:after AS bigint)
    RETURNING consumer
), added AS (
    INSERT INTO inbox_queue (consumer, partition, lane, sequence, message)
    SELECT turn.consumer, new.partition, new.lane, new.sequence, new.message
    FROM turn, unnest(
        CAST(:partitions AS int[]), CAST(:lanes AS bigint[]), CAST(:sequences AS bigint[]), CAST(:messages AS bytea[])
    ) AS new (partition, lane, sequence, message)
    ORDER BY new.sequence
)
SELECT consumer FROM turn;

-- name: renew
WITH gone AS (
    DELETE FROM inbox_workers WHERE consumer = :consumer AND expires_at < now() - interval '1 day'
)
INSERT INTO inbox_workers (consumer, worker, expires_at)
VALUES (:consumer, CAST(:worker AS uuid), clock_timestamp() + CAST(:ms AS int) * interval '1 millisecond')
ON CONFLICT (consumer, worker) DO UPDATE SET expires_at = excluded.expires_at;

-- A worker takes partitions without a live owner up to its share.
-- name: claim
WITH live AS MATERIALIZED (
    SELECT worker FROM inbox_workers WHERE consumer = :consumer AND expires_at > now()
), free AS (
    SELECT partition FROM inbox_partitions
    WHERE consumer = :consumer AND (worker IS NULL OR worker NOT IN (SELECT worker FROM live))
    ORDER BY partition
    LIMIT greatest(0, (
        SELECT (CAST(:partitions AS int) + count(*) - 1) / greatest(count(*), 1) FROM live
    ) - (
        SELECT count(*) FROM inbox_partitions WHERE consumer = :consumer AND worker = CAST(:worker AS uuid)
    ))
    FOR UPDATE SKIP LOCKED
)
UPDATE inbox_partitions AS owned SET worker = CAST(:worker AS uuid), epoch = owned.epoch + 1
FROM free WHERE owned.consumer = :consumer AND owned.partition = free.partition;

-- name: owned
SELECT partition, epoch, (
    SELECT count(*) FROM inbox_workers AS live WHERE live.consumer = :consumer AND live.expires_at > now()
)
FROM inbox_partitions WHERE consumer = :consumer AND worker = CAST(:worker AS uuid)
ORDER BY partition;

-- name: release
UPDATE inbox_partitions SET worker = NULL
WHERE consumer = :consumer AND worker = CAST(:worker AS uuid) AND partition = ANY(CAST(:partitions AS int[]));

-- name: leave
WITH free AS (
    UPDATE inbox_partitions SET worker = NULL WHERE consumer = :consumer AND worker = CAST(:worker AS uuid)
), turn AS (
    UPDATE inbox_readers SET worker = NULL WHERE consumer = :consumer AND worker = CAST(:worker AS uuid)
)
DELETE FROM inbox_workers WHERE consumer = :consumer AND worker = CAST(:worker AS uuid);

-- A message that waits for its retry keeps back all later ones of its lane. Twice a partition's share of the limit is read of
-- each, as most of the queue would be read and sorted for one batch otherwise.
-- name: next
WITH head AS MATERIALIZED (
    SELECT next.position, owned.epoch
    FROM inbox_partitions AS owned CROSS JOIN LATERAL (
        SELECT queued.position FROM inbox_queue AS queued
        WHERE queued.consumer = owned.consumer AND queued.partition = owned.partition
          AND queued.position <> ALL(CAST(:in_hand AS bigint[]))
          AND (queued.retry_at IS NULL OR queued.retry_at <= now())
          AND NOT EXISTS (
              SELECT FROM inbox_queue AS failed
              WHERE failed.consumer = queued.consumer AND failed.lane = queued.lane
                AND failed.position < queued.position AND failed.retry_at > now()
          )
        ORDER BY queued.position LIMIT greatest(16, 2 * CAST(:limit AS int) / (
            SELECT greatest(1, count(*)) FROM inbox_partitions AS own
            WHERE own.consumer = :consumer AND own.worker = CAST(:worker AS uuid)
        ))
    ) AS next
    WHERE owned.consumer = :consumer AND owned.worker = CAST(:worker AS uuid)
      AND owned.partition <> ALL(CAST(:draining AS int[]))
    ORDER BY next.position LIMIT CAST(:limit AS int)
)
SELECT queued.position, queued.partition, head.epoch, queued.lane, queued.sequence, queued.failures, queued.message
FROM head JOIN inbox_queue AS queued USING (position) ORDER BY queued.position;

-- Whoever settled a message may remove it; only the owner of its partition may postpone it.
-- name: settle
WITH retry AS MATERIALIZED (
    SELECT * FROM unnest(
        CAST(:retried AS bigint[]), CAST(:partitions AS int[]), CAST(:epochs AS bigint[]), CAST(:delays AS bigint[])
    ) AS retry (position, partition, epoch, delay_ms)
), postponed AS (
    UPDATE inbox_queue AS queued
    SET failures = queued.failures + 1, retry_at = clock_timestamp() + retry.delay_ms * interval '1 millisecond'
    FROM retry JOIN inbox_partitions AS owned
        ON owned.consumer = :consumer AND owned.partition = retry.partition AND owned.epoch = retry.epoch
    WHERE queued.position = retry.position
)
DELETE FROM inbox_queue WHERE position = ANY(CAST(:settled AS bigint[]));

-- name: use
SELECT (SELECT count(*) FROM inbox_queue WHERE consumer = :consumer),
       (SELECT count(*) FROM inbox_workers WHERE consumer = :consumer AND expires_at > now());
