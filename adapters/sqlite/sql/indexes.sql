-- The indexes of messages. Indexes for search end with the columns of the search order: `timestamp`, and `id`, with which
-- SQLite ends all of them.

CREATE INDEX idx_timestamp_v{version} ON mailbox_v{version} (timestamp);
CREATE INDEX idx_topic_v{version} ON mailbox_v{version} (topic, timestamp);
CREATE {unique} INDEX mailbox_v{version}_message_id ON mailbox_v{version} (message_id, mailbox, topic)
    WHERE message_id IS NOT NULL;
CREATE INDEX idx_principal_v{version} ON mailbox_v{version} (principal, timestamp) WHERE principal IS NOT NULL;
CREATE INDEX idx_correlation_id_v{version} ON mailbox_v{version} (correlation_id, timestamp)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX idx_trace_id_v{version} ON mailbox_v{version} (trace_id, timestamp) WHERE trace_id IS NOT NULL;
-- For parts of ids, which are sought by reading an index on each.
CREATE INDEX mailbox_v{version}_span_id ON mailbox_v{version} (span_id) WHERE span_id IS NOT NULL;
-- Most messages are acked or archived: a search for these reads all.
CREATE INDEX mailbox_v{version}_status ON mailbox_v{version} (status, timestamp)
    WHERE status NOT IN ('acked', 'archived');

-- For `follow`: lookups of an event's message, of unsettled messages, and of messages that are due.
CREATE INDEX mailbox_v{version}_stream ON mailbox_v{version} (stream);
CREATE INDEX mailbox_v{version}_unsettled ON mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON mailbox_v{version} (mailbox, due) WHERE status = 'delayed';

ANALYZE mailbox_v{version};
