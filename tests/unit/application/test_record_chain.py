"""The chain of records: cut, moved or edited records are found, and where (beyond svc-mailbox I-12)."""

from typing import Any

import pytest

from postroom.application.mailbox.codec import to_record
from postroom.domain.errors import BrokenLog
from postroom.domain.message import Headers, MessageAcked, MessageReceived, MessageSent
from postroom.domain.record import GENESIS, Record, verify_chain

EMPTY = Headers(1)
FULL = Headers(1, "id", "type", "url", "1", "aes", "corr", "me", "ns", "trace", "span", {"k": "v"})


def a_log() -> list[Record]:
    events = [
        MessageSent(b"a" * 16, 1, 5, "t", 0, 5, 9, 1, "key", b"p" * 32, b"h" * 32, FULL, b"envelope"),
        MessageSent(b"b" * 16, 1, 5, "t", 0, 5, 9, 1, None, b"p" * 32, b"h" * 32, EMPTY, b"envelope"),
        MessageReceived(b"a" * 16, 2, 6, 1, 9, "worker"),
        MessageAcked(b"a" * 16, 3, 7, 1),
    ]
    records: list[Record] = []
    chain = GENESIS
    for position, event in enumerate(events, 1):
        records.append(to_record(event, position, 1, chain))
        chain = records[-1].chain
    return records


def broken_at(records: list[Record]) -> int:
    with pytest.raises(BrokenLog) as found:
        verify_chain(records, GENESIS, 1)
    return found.value.position


def test_a_whole_log_verifies_to_its_head() -> None:
    records = a_log()
    assert verify_chain(records, GENESIS, 1) == (4, records[-1].chain)
    assert verify_chain([], GENESIS, 1) == (0, GENESIS)


def test_verification_may_start_anywhere_with_the_hash_before() -> None:
    records = a_log()
    assert verify_chain(records[2:], records[1].chain, 3) == (4, records[3].chain)
    with pytest.raises(BrokenLog):
        verify_chain(records[2:], GENESIS, 3)


@pytest.mark.parametrize("column", Record._fields)
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_an_edit_of_any_column_of_any_record_is_detected(column: str, index: int) -> None:
    records = a_log()
    value = getattr(records[index], column)
    other = {int: 77, str: "edited", bytes: b"edited", type(None): "added"}[type(value)]
    edit: dict[str, Any] = {column: other}
    records[index] = records[index]._replace(**edit)
    # A position is what the log is read by: a record with another one is missed at its own.
    assert broken_at(records) == index + 1


@pytest.mark.parametrize("column", Record._fields[1:])
def test_a_column_set_to_null_is_detected(column: str) -> None:
    records = a_log()
    if getattr(records[0], column) is not None:
        edit: dict[str, Any] = {column: None}
        records[0] = records[0]._replace(**edit)
        assert broken_at(records) == 1


def test_a_removed_record_is_detected() -> None:
    records = a_log()
    assert broken_at(records[1:]) == 1
    assert broken_at([*records[:2], *records[3:]]) == 3


def test_a_removed_record_is_detected_after_renumbering_the_others() -> None:
    records = a_log()
    closed = [*records[:1], *(record._replace(position=record.position - 1) for record in records[2:])]
    assert broken_at(closed) == 2


def test_swapped_records_are_detected_with_swapped_positions() -> None:
    records = a_log()
    one, two = records[1]._replace(position=3), records[2]._replace(position=2)
    assert broken_at([records[0], two, one, records[3]]) == 2


def test_a_record_of_another_log_is_detected() -> None:
    records = a_log()
    inserted = to_record(MessageAcked(b"c" * 16, 2, 6, 1), 3, 1, GENESIS)
    assert broken_at([*records[:2], inserted, records[2]._replace(position=4)]) == 3


def test_the_error_says_where_and_what_to_do() -> None:
    records = a_log()
    records[2] = records[2]._replace(attempt=9)
    with pytest.raises(
        BrokenLog, match=r"position 3 does not match its hash.*Restore the store from a backup"
    ):
        verify_chain(records, GENESIS, 1)
    with pytest.raises(BrokenLog, match=r"jumps from position 1 to 3: records were removed"):
        verify_chain([records[0], records[2]], GENESIS, 1)
