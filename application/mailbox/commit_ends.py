"""Ends of commits: the positions at which a log may be cut, sealed and snapshotted."""

from postroom.application.ports.event_log import CommitReader
from postroom.domain.commit import Commit


def ends_with(log: CommitReader, position: int, chain: bytes) -> bool:
    """Return whether a commit with this chain hash ends at a position of the log."""
    return any(
        (commit.last, commit.chain) == (position, chain)
        for commit in log.commits_of([position], envelopes=False)
    )


def last_commit_through(log: CommitReader, position: int) -> Commit | None:
    """Return the last commit that ends at or before a position, without envelopes, or None.

    Arguments:
        position: at most the position of the log's end.
    """
    for commit in log.commits_of([position], envelopes=False):
        if commit.last == position:
            return commit
        return next(iter(log.commits_of([commit.first - 1], envelopes=False)), None)
    return None
