-- Messages that transactions recorded for a mailbox; its owner sends and deletes them. A refused one keeps its error.
CREATE TABLE outbox_messages (
    position BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id       TEXT NOT NULL,
    mailbox  TEXT NOT NULL,
    topic    TEXT NOT NULL,
    message  TEXT NOT NULL,
    error    TEXT
);
