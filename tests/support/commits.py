"""Commits that were read from a log, to be appended to another."""

from collections.abc import Iterable

from postroom.application.mailbox.codec import to_records
from postroom.domain.commit import Commit, IndexEntry


def as_appended(commits: Iterable[Commit]) -> list[Commit]:
    """Return commits with their entries of the index, which those that were read do not have."""
    return [
        commit._replace(
            entries=[
                IndexEntry(record.stream, record.version, record.position)
                for record in to_records(commit)
                if not record.distance
            ]
        )
        for commit in commits
    ]
