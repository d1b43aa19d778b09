-- Statements of the key store in PostgreSQL.

-- name: create_master_key
-- The key that wraps all data keys; it is never replaced.
INSERT INTO postroom_keys.master_key (one, key_id) VALUES (1, %(key_id)s) ON CONFLICT DO NOTHING;

-- name: master_key
SELECT key_id FROM postroom_keys.master_key;

-- name: keys_of_subjects
SELECT blind_index, pseudonym, data_key FROM postroom_keys.subjects
WHERE blind_index = ANY (%(indexes)s::bytea[]) AND data_key IS NOT NULL;

-- name: keys_of_pseudonyms
SELECT pseudonym, data_key FROM postroom_keys.subjects WHERE pseudonym = ANY (%(pseudonyms)s::text[]);

-- name: add_subjects
-- New subjects, other than those that another process adds. One process at a time: each waits for the rows of others,
-- so that two with the same subjects in another order would block each other.
INSERT INTO postroom_keys.subjects (pseudonym, blind_index, data_key, created_at)
SELECT new.pseudonym, new.blind_index, new.data_key, %(now)s
FROM
    (SELECT pg_advisory_xact_lock(hashtextextended('postroom_keys.subjects', 0))) AS locked,
    unnest(%(pseudonyms)s::text[], %(indexes)s::bytea[], %(data_keys)s::bytea[]) WITH ORDINALITY AS new (
        pseudonym, blind_index, data_key, number
    )
ORDER BY new.number
ON CONFLICT (blind_index) WHERE data_key IS NOT NULL DO NOTHING;

-- name: find_subject
-- The subject of a name that has a key, or else the one whose erasure is not recorded yet.
SELECT pseudonym, created_at, erased_at, blind_index IS NULL FROM postroom_keys.subjects
WHERE blind_index = %(blind_index)s ORDER BY data_key IS NULL, number LIMIT 1;

-- name: list_subjects
-- All subjects, oldest first.
SELECT pseudonym, created_at, erased_at, blind_index IS NULL FROM postroom_keys.subjects ORDER BY number;

-- name: rewrite
-- Destroy a key, or remove the blind index of one that was destroyed; false if there is no such subject.
SELECT postroom_keys.rewrite_subjects(%(pseudonym)s, %(destroyed_at)s);
