-- Settings have saved searches from here on (ADR 0142), and snapshots another version (ADR 0067), which a former
-- version can't read. The tables do not change; the name is the version that wrote the format first.

INSERT INTO postroom.postroom_migrations (set, number, name, checksum) VALUES ('format', 4, '0.2.0', '');
