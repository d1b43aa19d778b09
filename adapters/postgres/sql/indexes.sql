-- The indexes of messages, built by two connections, the slowest first; that of the key is generated.
-- Indexes for search end with the columns of the search order.
-- An entry of a B-tree is limited to 2,700 bytes: unbounded columns are indexed by their first {indexed_chars} characters.
-- SP-GiST has no such limit, and serves equality on the whole column in queries of one's own.

CREATE {unique} INDEX mailbox_v{version}_message_id ON postroom.mailbox_v{version} (message_id, mailbox);
CREATE INDEX idx_topic_v{version} ON postroom.mailbox_v{version} (topic, timestamp, id);
CREATE INDEX idx_correlation_id_v{version} ON postroom.mailbox_v{version}
    USING spgist (correlation_id) WHERE correlation_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_correlation_id ON postroom.mailbox_v{version}
    (left(correlation_id, {indexed_chars}), timestamp, id) WHERE correlation_id IS NOT NULL;
CREATE INDEX idx_principal_v{version} ON postroom.mailbox_v{version}
    USING spgist (principal) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_principal ON postroom.mailbox_v{version}
    (left(principal, {indexed_chars}), timestamp, id) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_mailbox ON postroom.mailbox_v{version} (mailbox, timestamp, id);
CREATE INDEX mailbox_v{version}_status ON postroom.mailbox_v{version} (status, timestamp, id);
CREATE INDEX idx_trace_id_v{version} ON postroom.mailbox_v{version}
    USING spgist (trace_id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_trace_id ON postroom.mailbox_v{version}
    (left(trace_id, {indexed_chars}), timestamp, id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_namespace ON postroom.mailbox_v{version}
    (left(namespace, {indexed_chars}), timestamp, id) WHERE namespace IS NOT NULL;
CREATE INDEX idx_timestamp_v{version} ON postroom.mailbox_v{version} (timestamp, id);

-- For `follow`: lookups of an event's message, of unsettled messages, and of messages that are due.
CREATE INDEX mailbox_v{version}_stream ON postroom.mailbox_v{version} (stream, mailbox);
CREATE INDEX mailbox_v{version}_unsettled ON postroom.mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON postroom.mailbox_v{version} (mailbox, due) WHERE status = 'delayed';
