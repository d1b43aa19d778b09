-- The indexes of messages, one statement at a time, those that take longest first; a key's is made of its columns.
-- Every index of search ends in the order of its results.
-- An index entry holds 2,700 bytes at most: where senders may write more, the first {indexed_chars} characters lead.

CREATE UNIQUE INDEX ON postroom.mailbox_v{version} (message_id, mailbox);
CREATE INDEX ON postroom.mailbox_v{version} (topic, timestamp, id);
CREATE INDEX ON postroom.mailbox_v{version} (left(correlation_id, {indexed_chars}), timestamp, id)
    WHERE correlation_id IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (left(principal, {indexed_chars}), timestamp, id)
    WHERE principal IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (mailbox, timestamp, id);
CREATE INDEX ON postroom.mailbox_v{version} (status, timestamp, id);
CREATE INDEX ON postroom.mailbox_v{version} (left(trace_id, {indexed_chars}), timestamp, id)
    WHERE trace_id IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (left(namespace, {indexed_chars}), timestamp, id)
    WHERE namespace IS NOT NULL;
CREATE INDEX ON postroom.mailbox_v{version} (timestamp, id);

-- By these `follow` finds what an event is about, what is unsettled, and what is due.
CREATE UNIQUE INDEX ON postroom.mailbox_v{version} (stream, mailbox);
CREATE INDEX ON postroom.mailbox_v{version} (mailbox, topic, shard, created_at)
    WHERE status IN ('ready', 'delayed', 'in_flight', 'dead');
CREATE INDEX ON postroom.mailbox_v{version} (mailbox, due) WHERE status = 'delayed';
