"""The statement that appends commits to a log in PostgreSQL, in one round trip."""

from collections.abc import Sequence

from postroom.adapters.postgres.columns import Packed, array, integer, integers, uuids
from postroom.adapters.sql.statements import statements
from postroom.application.mailbox.compression import compress
from postroom.domain.commit import POSITIONS_PER_MAILBOX, Commit, IndexEntry, LastEvent

_SQL = statements("postroom.adapters.postgres", "appends.sql")


def append_statement(
    mailbox: int, partition_positions: int, commits: Sequence[Commit]
) -> tuple[str, dict[str, Packed]]:
    """Return the statement that appends commits and changes the index, and its values.

    Arguments:
        mailbox: the mailbox's id.
        partition_positions: number of positions in each of its partitions.
    """
    base = mailbox * POSITIONS_PER_MAILBOX
    values = {
        "id": integer(mailbox),
        "first": integer(commits[0].first),
        "places": integers([base + commit.first for commit in commits]),
        "lasts": integers([commit.last for commit in commits]),
        "epochs": integers([commit.epoch for commit in commits]),
        "ats": integers([commit.at for commit in commits]),
        "chains": array(bytes, [commit.chain for commit in commits]),
        "events": array(bytes, [compress(commit.events) for commit in commits]),
        "envelopes": array(bytes, [compress(commit.envelopes) for commit in commits]),
    }
    entries, updates = _index_changes(commits)
    if not entries and not updates:
        return _SQL["append"], values
    values["entry_places"] = integers([base + entry.position for entry in entries])
    values["streams"] = uuids([entry.stream for entry in entries])
    if not updates and all(entry.version == 1 and entry.last is None for entry in entries):
        return _SQL["append_messages"], values
    values["versions"] = integers([entry.version for entry in entries])
    values["entry_lasts"] = array(int, [entry.last for entry in entries])
    values["updated_places"] = integers([base + update.position for update in updates])
    values["updated_streams"] = uuids([update.stream for update in updates])
    values["updated_lasts"] = integers([update.last for update in updates])
    low, high = _partitions(partition_positions, [update.position for update in updates])
    return _SQL["append_and_update"].format(low=base + low, high=base + high), values


def _index_changes(commits: Sequence[Commit]) -> tuple[list[IndexEntry], list[LastEvent]]:
    """Return new entries, and updates of earlier ones: a statement can't update what it inserts."""
    entries = [entry for commit in commits for entry in commit.entries]
    updates = {
        (update.stream, update.position): update for commit in commits for update in commit.last_events
    }
    if updates:
        latest = [updates.pop((entry.stream, entry.position), entry).last for entry in entries]
        entries = [entry._replace(last=last) for entry, last in zip(entries, latest, strict=True)]
    return entries, list(updates.values())


def _partitions(size: int, positions: Sequence[int]) -> tuple[int, int]:
    """Return the first position of the partitions that hold these positions, and the first one after them."""
    if not positions:
        return 1, 1
    return (min(positions) - 1) // size * size + 1, -(-max(positions) // size) * size + 1
