-- Messages sent, with their sizes.
WITH messages AS (
    SELECT e.topic, e.principal, e.size, unix_micros(e.at) AS sent_at
    FROM {events} AS e
)
SELECT
    timestamp_micros(sent_at - sent_at % :period) AS start,
    topic,
    principal,
    count(*) AS messages,
    1e6 * count(*) / :period AS per_second,
    CAST(sum(size) AS BIGINT) AS bytes,
    percentile_disc(0.5) WITHIN GROUP (ORDER BY size) AS size_p50,
    percentile_disc(0.95) WITHIN GROUP (ORDER BY size) AS size_p95,
    max(size) AS size_max
FROM messages
WHERE sent_at >= :since AND sent_at < :until
GROUP BY sent_at - sent_at % :period, topic, principal
ORDER BY start, topic, principal NULLS FIRST
