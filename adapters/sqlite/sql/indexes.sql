-- The indexes of messages. Indexes for search end with the columns of the search order.

CREATE INDEX idx_timestamp_v{version} ON mailbox_v{version} (timestamp, id);
CREATE INDEX idx_topic_v{version} ON mailbox_v{version} (topic, timestamp, id);
CREATE INDEX mailbox_v{version}_mailbox ON mailbox_v{version} (mailbox, timestamp, id);
CREATE {unique} INDEX mailbox_v{version}_message_id ON mailbox_v{version} (message_id, mailbox, topic);
CREATE INDEX idx_principal_v{version} ON mailbox_v{version} (principal, timestamp, id) WHERE principal IS NOT NULL;
CREATE INDEX idx_correlation_id_v{version} ON mailbox_v{version} (correlation_id, timestamp, id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX idx_trace_id_v{version} ON mailbox_v{version} (trace_id, timestamp, id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_namespace ON mailbox_v{version} (namespace, timestamp, id) WHERE namespace IS NOT NULL;
CREATE INDEX mailbox_v{version}_status ON mailbox_v{version} (status, timestamp, id);

-- For `follow`: lookups of an event's message, of unsettled messages, and of messages that are due.
CREATE INDEX mailbox_v{version}_stream ON mailbox_v{version} (stream, mailbox);
CREATE INDEX mailbox_v{version}_unsettled ON mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON mailbox_v{version} (mailbox, due) WHERE status = 'delayed';

ANALYZE mailbox_v{version};
