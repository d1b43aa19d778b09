-- An index entry holds at most 2,704 bytes: of an aggregate with a longer name no event could be parked.
CREATE INDEX idx_outbox_retries_aggregate ON outbox_retries (hashtextextended(aggregate_type || '/' || aggregate_id, 0));
DROP INDEX idx_outbox_held;
