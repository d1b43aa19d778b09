-- Outcomes of messages under each policy of a grid; number 0 is the actual history.
WITH policies AS (
    SELECT * FROM (VALUES {policies})
        AS v (number, bit, attempts, backoff_ms, backoff_max_ms, visibility_ms)
),
outcomes AS (
    SELECT p.number, CASE WHEN :by_topic = 1 THEN m.topic END AS topic, m.effect, m.assumed,
        m.best_status, m.best_deliveries, m.best_dead_letterings, m.best_queued,
        m.worst_status, m.worst_deliveries, m.worst_dead_letterings, m.worst_queued
    FROM {events} AS m
    -- Bits of the column policies select the policies that a row belongs to.
    INNER JOIN policies AS p ON (m.policies & p.bit) <> 0
    WHERE m.sent_at >= :since AND m.sent_at < :until
),
ranks AS (
    -- percentile_disc would hold all times of a policy in memory.
    SELECT *,
        count(*) OVER (PARTITION BY number, topic) AS messages,
        row_number() OVER (PARTITION BY number, topic ORDER BY best_queued) AS best_rank,
        row_number() OVER (PARTITION BY number, topic ORDER BY worst_queued) AS worst_rank
    FROM outcomes
),
figures AS (
    SELECT
        number,
        topic,
        count(*) AS messages,
        count(CASE WHEN effect = 'unchanged' THEN 1 END) AS unchanged,
        count(CASE WHEN effect = 'avoided' THEN 1 END) AS avoided,
        count(CASE WHEN effect = 'pending' THEN 1 END) AS pending,
        count(CASE WHEN effect = 'caused' THEN 1 END) AS caused,
        count(CASE WHEN assumed > 0 THEN 1 END) AS undecided,
        CAST(sum(assumed) AS BIGINT) AS more_deliveries,
        count(CASE WHEN best_status = 'settled' THEN 1 END) AS settled_best,
        count(CASE WHEN worst_status = 'settled' THEN 1 END) AS settled_worst,
        count(CASE WHEN best_status = 'dead' THEN 1 END) AS dead_best,
        count(CASE WHEN worst_status = 'dead' THEN 1 END) AS dead_worst,
        count(CASE WHEN best_status = 'removed' THEN 1 END) AS removed_best,
        count(CASE WHEN worst_status = 'removed' THEN 1 END) AS removed_worst,
        count(CASE WHEN best_status = 'waiting' THEN 1 END) AS waiting_best,
        count(CASE WHEN worst_status = 'waiting' THEN 1 END) AS waiting_worst,
        count(CASE WHEN best_dead_letterings > 0 THEN 1 END) AS dead_lettered_best,
        count(CASE WHEN worst_dead_letterings > 0 THEN 1 END) AS dead_lettered_worst,
        CAST(sum(best_deliveries) AS BIGINT) AS deliveries_best,
        CAST(sum(worst_deliveries) AS BIGINT) AS deliveries_worst,
        CAST(sum(CASE WHEN best_deliveries > 1 THEN best_deliveries - 1 ELSE 0 END) AS BIGINT)
            AS redeliveries_best,
        CAST(sum(CASE WHEN worst_deliveries > 1 THEN worst_deliveries - 1 ELSE 0 END) AS BIGINT)
            AS redeliveries_worst,
        max(CASE WHEN best_rank = ceil(0.5 * messages) THEN best_queued END) / 1e3 AS queued_p50_best_ms,
        max(CASE WHEN worst_rank = ceil(0.5 * messages) THEN worst_queued END) / 1e3 AS queued_p50_worst_ms,
        max(CASE WHEN best_rank = ceil(0.95 * messages) THEN best_queued END) / 1e3 AS queued_p95_best_ms,
        max(CASE WHEN worst_rank = ceil(0.95 * messages) THEN worst_queued END) / 1e3 AS queued_p95_worst_ms,
        max(best_queued) / 1e3 AS queued_max_best_ms,
        max(worst_queued) / 1e3 AS queued_max_worst_ms
    FROM ranks
    GROUP BY number, topic
)
SELECT f.topic, p.attempts, p.backoff_ms, p.backoff_max_ms, p.visibility_ms,
    f.messages, f.unchanged, f.avoided, f.pending, f.caused, f.undecided, f.more_deliveries,
    f.settled_best, f.settled_worst, f.dead_best, f.dead_worst,
    f.removed_best, f.removed_worst, f.waiting_best, f.waiting_worst,
    f.dead_lettered_best, f.dead_lettered_worst, f.deliveries_best, f.deliveries_worst,
    f.redeliveries_best, f.redeliveries_worst,
    f.queued_p50_best_ms, f.queued_p50_worst_ms, f.queued_p95_best_ms, f.queued_p95_worst_ms,
    f.queued_max_best_ms, f.queued_max_worst_ms
FROM figures AS f INNER JOIN policies AS p ON p.number = f.number
ORDER BY f.topic NULLS FIRST, f.number
