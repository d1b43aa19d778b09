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
from tests.support.altered_commits import alter

MAILBOX = "acme@one"
# Commits of MailboxCreated and OwnershipTaken, three of MessageSent, MessageReceived, MessageAcked
SENT, LAST_SENT, RECEIVED, LAST = 3, 5, 6, 7


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
    """Run statements in which `:base` stands for the place before the mailbox's first commit."""
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


@pytest.mark.parametrize("column", ["last", "epoch", "at", "chain", "events"])
@pytest.mark.parametrize("position", [SENT, RECEIVED])
def test_an_edit_of_any_column_is_found(store: str, column: str, position: int) -> None:
    edit = {"chain": "zeroblob(32)", "events": "x'90'"}.get(column, f"{column} + 7")
    tamper(store, f"UPDATE log SET {column} = {edit} WHERE place = :base + {position}")
    assert broken_at(store) == position


def test_a_flipped_bit_of_an_envelope_is_found(store: str) -> None:
    alter(store, "envelopes", lambda part: part[:-1] + bytes([part[-1] ^ 1]) if part else part)
    assert broken_at(store) == LAST_SENT


@pytest.mark.parametrize(("removed", "found"), [(1, 3), (SENT, SENT), (LAST, LAST)])
def test_a_removed_commit_is_found_at_the_start_in_the_middle_and_at_the_end(
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


def test_swapped_commits_are_found(store: str) -> None:
    tamper(
        store,
        "UPDATE log SET place = 1 WHERE place = :base + 6",
        "UPDATE log SET place = :base + 6, last = 6 WHERE place = :base + 7",
        "UPDATE log SET place = :base + 7, last = 7 WHERE place = 1",
    )
    assert broken_at(store) == RECEIVED


def test_a_log_rewritten_from_its_start_is_found_by_whoever_kept_its_hash(store: str) -> None:
    kept = verify(store)
    with pytest.raises(BrokenLog, match=f"has another commit at position {LAST} than before"):
        verify(store, expected_last=LAST, expected_chain="00" * 32)
    with pytest.raises(BrokenLog, match=f"ends at position {LAST}, but it reached {LAST + 1} before"):
        verify(store, expected_last=LAST + 1, expected_chain=kept.chain)


async def test_a_log_that_grew_since_still_fits_the_hash_that_was_kept(store: str) -> None:
    kept = verify(store)
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.send_message(NewMessage(topic="t", payload=b"more"))
    grown = verify(store, expected_last=kept.last, expected_chain=kept.chain)
    assert grown.last > kept.last
