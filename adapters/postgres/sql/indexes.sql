-- The indexes of messages, built by two connections, the slowest first; that of the key is generated.
-- Indexes for search end with the time; the few rows of the same time are sorted by id.
-- An entry of a B-tree is limited to 2,700 bytes: of unbounded columns, B-trees have the values of up to {indexed_bytes}
-- bytes. They are on the columns themselves, so that rows are counted without reading them.
-- SP-GiST has no such limit: it serves longer values, and equality in queries of one's own. An id is unique in its topic,
-- whose name would be too long beside the others.

CREATE {unique} INDEX mailbox_v{version}_message_id ON postroom.mailbox_v{version} (message_id, mailbox, md5(topic))
    WHERE message_id IS NOT NULL;
CREATE INDEX idx_topic_v{version} ON postroom.mailbox_v{version} (topic, timestamp);
CREATE INDEX idx_correlation_id_v{version} ON postroom.mailbox_v{version}
    USING spgist (correlation_id) WHERE correlation_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_correlation_id ON postroom.mailbox_v{version}
    (correlation_id, timestamp) WHERE octet_length(correlation_id) <= {indexed_bytes};
CREATE INDEX idx_principal_v{version} ON postroom.mailbox_v{version}
    USING spgist (principal) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_principal ON postroom.mailbox_v{version}
    (principal, timestamp) WHERE octet_length(principal) <= {indexed_bytes};
-- Most messages are acked or archived: a search for these reads all.
CREATE INDEX mailbox_v{version}_status ON postroom.mailbox_v{version} (status, timestamp)
    WHERE status NOT IN ('acked', 'archived');
CREATE INDEX idx_trace_id_v{version} ON postroom.mailbox_v{version}
    USING spgist (trace_id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_trace_id ON postroom.mailbox_v{version}
    (trace_id, timestamp) WHERE octet_length(trace_id) <= {indexed_bytes};
CREATE INDEX idx_timestamp_v{version} ON postroom.mailbox_v{version} (timestamp);

-- For `follow`: lookups of an event's message, of unsettled messages, and of messages that are due.
CREATE INDEX mailbox_v{version}_stream ON postroom.mailbox_v{version} (stream);
CREATE INDEX mailbox_v{version}_unsettled ON postroom.mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON postroom.mailbox_v{version} (mailbox, due) WHERE status = 'delayed';
