"""The chain of commits: cut, moved or edited commits are found, and where (beyond svc-mailbox I-12)."""

from typing import Any

import pytest

from postroom.domain.commit import GENESIS, Commit, link, verify_chain
from postroom.domain.errors import BrokenLog

HASHED = ("first", "last", "epoch", "at", "chain", "events")


def a_log() -> list[Commit]:
    """Return four commits, of positions 1 to 2, 3, 4 to 6 and 7."""
    commits: list[Commit] = []
    chain, first = GENESIS, 1
    for number, count in enumerate((2, 1, 3, 1)):
        content = (first, first + count - 1, 1, 1_000 + number, b"events %d" % number)
        chain = link(chain, *content)
        commits.append(Commit(*content[:4], chain, content[4], b"envelopes"))
        first += count
    return commits


def broken_at(commits: list[Commit]) -> int:
    with pytest.raises(BrokenLog) as found:
        verify_chain(commits, GENESIS, 1)
    return found.value.position


def test_a_whole_log_verifies_to_its_head() -> None:
    commits = a_log()
    assert verify_chain(commits, GENESIS, 1) == (7, commits[-1].chain)
    assert verify_chain([], GENESIS, 1) == (0, GENESIS)


def test_verification_may_start_anywhere_with_the_hash_before() -> None:
    commits = a_log()
    assert verify_chain(commits[2:], commits[1].chain, 4) == (7, commits[3].chain)
    with pytest.raises(BrokenLog):
        verify_chain(commits[2:], GENESIS, 4)


@pytest.mark.parametrize("field", HASHED)
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_an_edit_of_any_field_of_any_commit_is_detected(field: str, index: int) -> None:
    commits = a_log()
    edit: dict[str, Any] = {field: 77 if isinstance(getattr(commits[index], field), int) else b"edited"}
    first = commits[index].first
    commits[index] = commits[index]._replace(**edit)
    assert broken_at(commits) == first


def test_a_removed_commit_is_detected() -> None:
    commits = a_log()
    assert broken_at(commits[1:]) == 1
    assert broken_at([*commits[:2], *commits[3:]]) == 4


def test_a_removed_commit_is_detected_after_renumbering_the_others() -> None:
    commits = a_log()
    closed = [each._replace(first=each.first - 1, last=each.last - 1) for each in commits[2:]]
    assert broken_at([*commits[:1], *closed]) == 3


def test_swapped_commits_are_detected_with_swapped_positions() -> None:
    commits = a_log()
    one, two = commits[3]._replace(first=3, last=3), commits[1]._replace(first=7, last=7)
    assert broken_at([commits[0], one, commits[2], two]) == 3


def test_commits_that_overlap_are_detected() -> None:
    commits = a_log()
    content = (2, 3, 1, 1_001, b"events")
    overlapping = Commit(*content[:4], link(commits[0].chain, *content), content[4])
    assert broken_at([commits[0], overlapping]) == 3


def test_a_commit_without_events_is_detected() -> None:
    content = (1, 0, 1, 1_001, b"events")
    assert broken_at([Commit(*content[:4], link(GENESIS, *content), content[4])]) == 1


def test_a_commit_of_another_log_is_detected() -> None:
    commits = a_log()
    content = (3, 3, 1, 1_001, b"events")
    other = Commit(*content[:4], link(GENESIS, *content), content[4])
    assert broken_at([commits[0], other, *commits[2:]]) == 3


def test_the_error_says_where_and_what_to_do() -> None:
    commits = a_log()
    with pytest.raises(BrokenLog, match=r"positions 4 to 6 does not match its hash.*Restore the store from"):
        verify_chain([*commits[:2], commits[2]._replace(events=b"")], GENESIS, 1)
    with pytest.raises(BrokenLog, match=r"jumps from position 2 to 4: commits were removed"):
        verify_chain([commits[0], commits[2]], GENESIS, 1)
