-- Messages have their sticky keys from here on, and may be rescheduled (ADR 0115): a former version would deliver
-- them out of order. The tables do not change; the name is the version that wrote the format first.

INSERT INTO postroom.postroom_migrations (set, number, name, checksum) VALUES ('format', 3, '0.1.0', '');
