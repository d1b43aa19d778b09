-- When a message was added to the queue, for the age of the oldest one in metrics and `postroom inbox backlog`. Messages that
-- are queued during the migration get its time.
ALTER TABLE inbox_queue ADD COLUMN added_at TIMESTAMPTZ NOT NULL DEFAULT now();
