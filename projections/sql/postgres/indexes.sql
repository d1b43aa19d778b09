-- The indexes of messages, one statement at a time, those that take longest first; a key's is made of its columns.
-- Two connections take turns with them. Every index of search ends in the order of its results.
-- An index entry holds 2,700 bytes at most: where senders may write more, the first {indexed_chars} characters lead.

CREATE INDEX mailbox_v{version}_message_id ON postroom.mailbox_v{version} (message_id, mailbox);
CREATE INDEX mailbox_v{version}_topic ON postroom.mailbox_v{version} (topic, timestamp, id);
CREATE INDEX mailbox_v{version}_correlation_id ON postroom.mailbox_v{version}
    (left(correlation_id, {indexed_chars}), timestamp, id) WHERE correlation_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_principal ON postroom.mailbox_v{version}
    (left(principal, {indexed_chars}), timestamp, id) WHERE principal IS NOT NULL;
CREATE INDEX mailbox_v{version}_mailbox ON postroom.mailbox_v{version} (mailbox, timestamp, id);
CREATE INDEX mailbox_v{version}_status ON postroom.mailbox_v{version} (status, timestamp, id);
CREATE INDEX mailbox_v{version}_trace_id ON postroom.mailbox_v{version}
    (left(trace_id, {indexed_chars}), timestamp, id) WHERE trace_id IS NOT NULL;
CREATE INDEX mailbox_v{version}_namespace ON postroom.mailbox_v{version}
    (left(namespace, {indexed_chars}), timestamp, id) WHERE namespace IS NOT NULL;
CREATE INDEX mailbox_v{version}_timestamp ON postroom.mailbox_v{version} (timestamp, id);

-- By these `follow` finds what an event is about, what is unsettled, and what is due.
CREATE INDEX mailbox_v{version}_stream ON postroom.mailbox_v{version} (stream, mailbox);
CREATE INDEX mailbox_v{version}_unsettled ON postroom.mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX mailbox_v{version}_due ON postroom.mailbox_v{version} (mailbox, due) WHERE status = 'delayed';
