-- Settings have saved searches from here on (ADR 0142), and snapshots another version (ADR 0067), which a former
-- version can't read. The tables do not change.

SELECT format FROM store_format;
