-- Where the owners of mailboxes answer processes of other hosts, and who may call them (ADR 0064).

-- The address and the certificate of an owner. A row counts while the session that wrote it has the mailbox's lock.
-- Unlogged: it means nothing on a replica or in a backup, and a crash of the server ends all sessions anyway.
CREATE UNLOGGED TABLE postroom.mailbox_owner (
    mailbox     TEXT COLLATE "C" PRIMARY KEY,
    session     INT NOT NULL,
    address     TEXT NOT NULL,
    certificate TEXT NOT NULL
);

-- SHA-256 of the tickets that callers have issued to themselves: who may write here may call the owner. The owner
-- deletes a ticket when it admits its bearer.
CREATE UNLOGGED TABLE postroom.owner_ticket (
    hash      BYTEA PRIMARY KEY,
    mailbox   TEXT COLLATE "C" NOT NULL,
    issued_at TIMESTAMPTZ NOT NULL DEFAULT NOW()
);
