-- The backlog of contexts is counted, not folded from the log, and so independent of versions.

-- name: save
INSERT INTO {schema}context_backlog (context, box, count, parked, oldest_at, as_of)
VALUES (:context, :box, :count, :parked, :oldest_at, :as_of)
ON CONFLICT (context, box) DO UPDATE
SET count = excluded.count, parked = excluded.parked, oldest_at = excluded.oldest_at, as_of = excluded.as_of
WHERE excluded.as_of > context_backlog.as_of;
