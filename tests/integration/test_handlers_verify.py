"""Whatever is done to a store behind Postroom's back, `verify` finds it and says where."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.messages import NewMessage
from postroom.application.queries.verify import Verification
from postroom.domain.errors import BrokenLog
from postroom.domain.record import Record

MAILBOX = "acme@one"
# MailboxCreated, OwnershipTaken, three of MessageSent, MessageReceived, MessageAcked
SENT, RECEIVED, LAST = 3, 6, 7


@pytest.fixture
async def store(tmp_path: Path) -> str:
    path = str(tmp_path / "store.db")
    headers: dict[str, Any] = {
        "content_type": "text/plain",
        "principal": "me",
        "correlation_id": "c",
        "trace_id": "t",
        "span_id": "s",
    }
    async with open_mailbox(path, MAILBOX, durability="relaxed") as mailbox:
        message = NewMessage(
            topic="t", payload=b"1", message_id="m1", attrs={"k": "v"}, idem_key="k", **headers
        )
        await mailbox.send_batch([message, *(NewMessage(topic="t", payload=b"%d" % n) for n in (2, 3))])
        (received,) = await mailbox.receive_messages("t", max_messages=1, consumer="worker")
        await mailbox.ack_messages([received.receipt])
    return path


def tamper(store: str, *statements: str) -> None:
    """Run statements in which `:base` stands for the place before the mailbox's first record."""
    with closing(sqlite3.connect(store)) as connection, connection:
        (base,) = connection.execute("SELECT (min(place) >> 40) << 40 FROM log").fetchone()
        for statement in statements:
            assert connection.execute(statement.replace(":base", str(base))).rowcount > 0, statement


def verify(store: str, **expected: object) -> Verification:
    with read_mailbox(store, MAILBOX) as reader:
        return reader.verify_log(**expected)  # type: ignore[arg-type]


def broken_at(store: str) -> int:
    with pytest.raises(BrokenLog, match="Restore the store from a backup") as found:
        verify(store)
    return found.value.position


def test_a_log_that_nobody_touched_verifies(store: str) -> None:
    seen: list[int] = []
    verified = verify(store, progress=seen.append)
    assert (verified.mailbox, verified.first, verified.last, verified.messages) == (MAILBOX, 1, LAST, 3)
    assert verify(store, expected_last=LAST, expected_chain=verified.chain) == verified


@pytest.mark.parametrize("column", [name for name in Record._fields if name != "position"])
@pytest.mark.parametrize("position", [SENT, RECEIVED])
def test_an_edit_of_any_column_is_found(store: str, column: str, position: int) -> None:
    edits = {
        "stream": "randomblob(16)",
        "state": "x'90ff'",
        "chain": "zeroblob(32)",
        "envelope": "x'0a01'",
        "custom_headers": "'{}'",
    }
    numbers = {"version", "epoch", "at", "shard", "attempt", "due", "timestamp"}
    edit = edits.get(column, "coalesce({0}, 0) + 7" if column in numbers else "coalesce({0}, '') || 'x'")
    tamper(store, f"UPDATE log SET {column} = {edit.format(column)} WHERE place = :base + {position}")
    assert broken_at(store) == position


def test_a_flipped_bit_of_an_envelope_is_found(store: str) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        place, blob = connection.execute("SELECT place, envelope FROM log WHERE message_id = 'm1'").fetchone()
        flipped = bytes([*blob[:-1], blob[-1] ^ 1])
        connection.execute("UPDATE log SET envelope = ? WHERE place = ?", (flipped, place))
    assert broken_at(store) == SENT


@pytest.mark.parametrize(("removed", "found"), [(1, 2), (4, 4), (LAST, LAST)])
def test_a_removed_record_is_found_at_the_start_in_the_middle_and_at_the_end(
    store: str, removed: int, found: int
) -> None:
    tamper(store, f"DELETE FROM log WHERE place = :base + {removed}")
    assert broken_at(store) == found


def test_a_log_of_which_nothing_is_left_is_found(store: str) -> None:
    tamper(store, "DELETE FROM log")
    assert broken_at(store) == LAST


async def test_a_mailbox_whose_end_was_cut_off_is_not_opened(store: str) -> None:
    tamper(store, f"DELETE FROM log WHERE place >= :base + {RECEIVED}")
    with pytest.raises(BrokenLog, match=f"reached position {LAST} when it was last closed"):
        async with open_mailbox(store, MAILBOX):
            pytest.fail("opened")


def test_swapped_records_are_found(store: str) -> None:
    tamper(
        store,
        "UPDATE log SET place = 1 WHERE place = :base + 4",
        "UPDATE log SET place = :base + 4 WHERE place = :base + 5",
        "UPDATE log SET place = :base + 5 WHERE place = 1",
    )
    assert broken_at(store) == 4


def test_a_log_rewritten_from_its_start_is_found_by_whoever_kept_its_hash(store: str) -> None:
    kept = verify(store)
    with pytest.raises(BrokenLog, match="has a different chain hash than before: the log was rewritten"):
        verify(store, expected_last=LAST, expected_chain="00" * 32)
    with pytest.raises(BrokenLog, match=f"ends at position {LAST}, but it reached {LAST + 1} before"):
        verify(store, expected_last=LAST + 1, expected_chain=kept.chain)


async def test_a_log_that_grew_since_still_fits_the_hash_that_was_kept(store: str) -> None:
    kept = verify(store)
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.send_message(NewMessage(topic="t", payload=b"more"))
    grown = verify(store, expected_last=kept.last, expected_chain=kept.chain)
    assert grown.last > kept.last
