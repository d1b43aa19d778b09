"""The logs of a store in JetStream, as followers of read models elsewhere see them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.backup import back_up
from postroom.adapters.compose.restore import restore
from postroom.adapters.compose.store import Store, open_store
from postroom.projections.incremental import Cursor
from postroom.projections.ports.read_model_store import FollowedLog
from tests.conformance.log_store import ONE
from tests.conformance.records import append, sent
from tests.support.stores import MAILBOX, live, message, receive_one
from tests.support.waiting import SECONDS, wait_until


@pytest.fixture
def store(jetstream_store: str) -> Store:
    return open_store(jetstream_store)


@pytest.fixture
def log(store: Store) -> Iterator[FollowedLog]:
    with closing(store.followed_log()) as log:
        yield log


async def test_heads_are_those_of_the_same_log_in_a_file(
    jetstream_store: str, log: FollowedLog, tmp_path: Path
) -> None:
    file = str(tmp_path / "store.db")
    async with open_mailbox(file, MAILBOX, durability="relaxed") as mailbox:
        await mailbox.send_message(message(b"to be removed"))
        await mailbox.ack_messages([(await receive_one(mailbox)).receipt])
        await mailbox.delete_old_events(mailbox.engine.now() + 1)
        await live(mailbox, 30)
    back_up(file, tmp_path / "backup")
    await restore(tmp_path / "backup", jetstream_store)
    await restore(tmp_path / "backup", str(tmp_path / "other.db"))
    with closing(open_store(str(tmp_path / "other.db")).followed_log()) as other:
        (head,) = other.heads({})
        assert head.first > 1
        for position in range(head.last + 3):
            cursors = {head.id: Cursor(position, 0)}
            mine, expected = log.heads(cursors)[0], other.heads(cursors)[0]
            if position > head.last - 1:  # the record that begins an epoch has the time of its restore
                mine, expected = mine._replace(chain=""), expected._replace(chain="")
            assert mine == expected


def test_one_process_follows_into_a_target(store: Store, log: FollowedLog) -> None:
    with closing(store.event_log(ONE)), closing(store.followed_log()) as other:
        with log.leader_lock("chdb") as is_leader:
            assert is_leader
            with other.leader_lock("chdb") as is_second, other.leader_lock("parquet") as is_other_target:
                assert (is_second, is_other_target) == (False, True)
            with closing(store.queried_log()) as queried:
                assert (queried.is_following("chdb"), queried.is_following("")) == (True, False)
        with other.leader_lock("chdb") as is_leader:
            assert is_leader


def test_a_follower_is_told_of_commits(store: Store, log: FollowedLog) -> None:
    with closing(store.event_log(ONE)) as owned, ThreadPoolExecutor(1) as thread:
        append(owned, [sent(1)])
        assert log.wait_for_commit(SECONDS)  # of what was committed before
        assert not log.wait_for_commit(0.01)
        waiting = thread.submit(log.wait_for_commit, SECONDS)
        append(owned, [sent(2)])
        assert waiting.result(SECONDS)
        wait_until(lambda: log.heads({})[0].last == 2)
