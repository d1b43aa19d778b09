-- The indexes of messages, one statement at a time. Every index of search ends in the order of its results.

CREATE INDEX mailbox_v{version}_timestamp ON mailbox_v{version} (timestamp, id);
CREATE INDEX mailbox_v{version}_topic ON mailbox_v{version} (topic, timestamp, id);
CREATE INDEX mailbox_v{version}_mailbox ON mailbox_v{version} (mailbox, timestamp, id);
CREATE INDEX mailbox_v{version}_message_id ON mailbox_v{version} (message_id, mailbox);
CREATE INDEX mailbox_v{version}_principal ON mailbox_v{version} (principal, timestamp, id) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_correlation_id ON mailbox_v{version} (correlation_id, timestamp, id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_trace_id ON mailbox_v{version} (trace_id, timestamp, id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_namespace ON mailbox_v{version} (namespace, timestamp, id) WHERE namespace IS NOT NULL;
CREATE INDEX mailbox_v{version}_status ON mailbox_v{version} (status, timestamp, id);

-- By these `follow` finds what an event is about, what is unsettled, and what is due.
CREATE INDEX mailbox_v{version}_stream ON mailbox_v{version} (stream, mailbox);
CREATE INDEX mailbox_v{version}_unsettled ON mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON mailbox_v{version} (mailbox, due) WHERE status = 'delayed';

ANALYZE mailbox_v{version};
