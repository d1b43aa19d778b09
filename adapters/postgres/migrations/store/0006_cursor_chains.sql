-- The position of the last record applied with the chain hash of its commit in hex (`12:c0ffee...`): a log that was replaced
-- or cut has another commit there. An earlier release moves the cursor without it, so that the positions differ.
ALTER TABLE postroom.projection_cursor ADD COLUMN chain TEXT COLLATE "C";
