-- name: create_master_key
-- The key that wraps all data keys of the file.
INSERT INTO master_key (one, key_id) VALUES (1, :key_id);

-- name: master_key
-- Id of the key that wraps the data keys.
SELECT key_id FROM master_key;

-- name: key_of_subject
-- Key of a subject by the blind index of its name.
SELECT pseudonym, data_key FROM subjects WHERE blind_index = :blind_index AND data_key IS NOT NULL;

-- name: key_of_pseudonym
-- Key by pseudonym; NULL if it was destroyed.
SELECT data_key FROM subjects WHERE pseudonym = :pseudonym;

-- name: add_subject
-- A new subject.
INSERT INTO subjects (pseudonym, blind_index, data_key, created_at)
VALUES (:pseudonym, :blind_index, :data_key, :created_at);

-- name: find_subject
-- The subject of a name that has a key, or else the one whose erasure is not recorded yet.
SELECT pseudonym, created_at, erased_at, blind_index IS NULL FROM subjects
WHERE blind_index = :blind_index ORDER BY data_key IS NULL, number LIMIT 1;

-- name: list_subjects
-- All subjects, oldest first.
SELECT pseudonym, created_at, erased_at, blind_index IS NULL FROM subjects ORDER BY number;

-- name: destroy
-- Destroy a key; the first time counts.
UPDATE subjects SET data_key = NULL, erased_at = :now WHERE pseudonym = :pseudonym AND data_key IS NOT NULL;

-- name: mark_recorded
-- Remove what leads from a name to its pseudonym.
UPDATE subjects SET blind_index = NULL WHERE pseudonym = :pseudonym AND data_key IS NULL;
