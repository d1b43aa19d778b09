-- The format of the store, which programs check before they use it; the name is the version that wrote it first.

INSERT INTO postroom.postroom_migrations (set, number, name, checksum) VALUES ('format', 2, '0.1.0', '');
