-- What follows a read model: what it is built from, how far it has come, and what had to be left out.

-- What a version is built from (`projections/sinks`), and which version's table each of its models is in: both JSON,
-- null where an earlier release built it.
ALTER TABLE postroom.projection ADD COLUMN plan TEXT, ADD COLUMN models TEXT;

-- How far a version that is complete has come: the log time (µs) and the position of each mailbox's last record.
CREATE TABLE postroom.projection_cursor (
    version    BIGINT NOT NULL,
    mailbox_id BIGINT NOT NULL,
    mailbox    TEXT COLLATE "C" NOT NULL,
    position   BIGINT NOT NULL,
    at         BIGINT NOT NULL,
    PRIMARY KEY (version, mailbox_id)
);

-- Which parts of a version that is being built were written, in the transaction of their rows.
CREATE TABLE postroom.projection_part (
    version   BIGINT NOT NULL,
    part      TEXT COLLATE "C" NOT NULL,
    rows      BIGINT NOT NULL,
    folded_at BIGINT NOT NULL,
    PRIMARY KEY (version, part)
);

-- Records that could not be folded and were left out.
CREATE TABLE postroom.projection_parked (
    version   BIGINT NOT NULL,
    place     BIGINT NOT NULL,
    mailbox   TEXT COLLATE "C" NOT NULL,
    position  BIGINT NOT NULL,
    type      TEXT COLLATE "C" NOT NULL,
    error     TEXT COLLATE "C" NOT NULL,
    parked_at BIGINT NOT NULL,
    PRIMARY KEY (version, place)
);
