-- The catalog of read-model versions, in SQLite and in PostgreSQL; {schema} is the prefix of table names.

-- name: begin
INSERT INTO {schema}projection (status, owner, started_at, cuts, plan)
VALUES ('building', :owner, :now, :cuts, :plan) RETURNING version;

-- name: share
UPDATE {schema}projection SET models = :models WHERE version = :version;

-- name: continue
UPDATE {schema}projection SET owner = :owner, plan = :plan WHERE version = :version;

-- name: building
SELECT version, owner, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN plan END FROM {schema}projection WHERE status = 'building' ORDER BY version DESC;

-- name: active
-- Versions whose tables have the format of an earlier release have no models, as if it had not recorded them.
SELECT version, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN models END AS models FROM {schema}projection WHERE status = 'active';

-- name: earlier
SELECT version, CASE WHEN replace(plan, '"format":"{format}"', '') <> plan THEN models END FROM {schema}projection
WHERE status = 'retired' ORDER BY finished_at DESC, version DESC;

-- name: current
SELECT version, models FROM {schema}projection WHERE status IN ('building', 'active', 'retired');

-- name: all
SELECT version, models FROM {schema}projection;

-- name: retire
UPDATE {schema}projection SET status = 'retired' WHERE status = 'active';

-- name: activate
UPDATE {schema}projection
SET status = 'active', finished_at = :now, counts = :counts, seconds = :seconds
WHERE version = :version;

-- name: reactivate
UPDATE {schema}projection SET status = 'active' WHERE version = :version;

-- name: end
UPDATE {schema}projection SET status = :status, error = :error WHERE version = :version;

-- name: parts
SELECT part FROM {schema}projection_part WHERE version = :version;

-- name: mark
INSERT INTO {schema}projection_part (version, part, rows, folded_at) VALUES (:version, :part, :rows, :now);

-- name: forget_parts
DELETE FROM {schema}projection_part WHERE version NOT IN (
    SELECT version FROM {schema}projection WHERE status = 'building'
);

-- name: parked
SELECT count(*) FROM {schema}projection_parked WHERE version = :version;

-- name: forget_parked
DELETE FROM {schema}projection_parked WHERE version NOT IN (
    SELECT version FROM {schema}projection WHERE status IN ('building', 'active', 'retired')
);

-- name: cursors
SELECT mailbox_id, position, at, chain, mailbox FROM {schema}projection_cursor WHERE version = :version;

-- name: start_cursor
INSERT INTO {schema}projection_cursor (version, mailbox_id, mailbox, position, at, chain)
VALUES (:version, :id, :name, :last, :at, :chain);

-- name: stop_cursor
DELETE FROM {schema}projection_cursor WHERE version = :version;

-- name: copy_cursor
INSERT INTO {schema}projection_cursor (version, mailbox_id, mailbox, position, at, chain)
SELECT :version, mailbox_id, mailbox, position, at, chain FROM {schema}projection_cursor WHERE version = :other;

-- name: forget_cursors
DELETE FROM {schema}projection_cursor WHERE version NOT IN (
    SELECT version FROM {schema}projection WHERE status IN ('building', 'active', 'retired')
);
