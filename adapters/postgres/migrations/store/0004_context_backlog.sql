-- What waits in the outbox and the inbox of each context (SDS-047 QRY-050, QRY-051), as it was counted last.
CREATE TABLE postroom.context_backlog (
    context   TEXT COLLATE "C" NOT NULL,
    box       TEXT COLLATE "C" NOT NULL CHECK (box IN ('outbox', 'inbox')),
    count     BIGINT NOT NULL,
    parked    BIGINT NOT NULL,
    oldest_at BIGINT,
    as_of     BIGINT NOT NULL,
    PRIMARY KEY (context, box)
);
