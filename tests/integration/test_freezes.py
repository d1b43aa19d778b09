"""Three processes that share a mailbox by `connect`, and are paused in turn.

    python -m tests.integration.test_freezes ROUNDS [STORE]

runs a longer model with a random seed. STORE is a path, or the URL of a database that was migrated.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from postroom import (
    EventFilter,
    Fenced,
    InvalidRequest,
    NewMessage,
    OwnedMailbox,
    RedriveSpec,
    open_mailbox,
    read_mailbox,
)
from postroom.adapters.compose.store import open_store
from postroom.application.queries.owner_queries import OwnerQueries
from postroom.application.redrive.jobs import RedriveJobs
from postroom.application.worker_reports import WorkerState
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.names import mailbox_stream
from postroom.domain.settings import SettingsChanges
from tests.support.servers.process import pause

OWNER_TIMEOUT_MS = 600
ROUNDS = 4
MESSAGE = NewMessage(topic="orders", payload=b"", idem_key="once")
JOB_ID = "0189b2d6-7c1e-7abc-8def-0123456789ab"

PEER = """
import asyncio, os, sys, time
from postroom import NewMessage, connect

async def main(store, owner_timeout_ms):
    async with connect(store, owner_timeout_ms=int(owner_timeout_ms)) as mailbox:
        queries = {
            "get_backlog": lambda: mailbox.get_backlog(),
            "list_topics": lambda: mailbox.list_topics(),
            "peek_messages": lambda: mailbox.peek_messages("orders", limit=1_000),
        }

        def count(query, answer):
            match query:
                case "get_backlog":
                    return answer.ready
                case "list_topics":
                    return sum(each.ready for each in answer)
            return len(answer)

        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = line.strip()
            if command == "send":
                await mailbox.send_message(NewMessage(topic="orders", payload=b""))
                print("sent", flush=True)
            elif command.startswith("block "):  # as a call that is not asynchronous
                while not os.path.exists(command[6:]):
                    time.sleep(0.01)
                print("released", flush=True)
            elif command == "owner":
                print((await mailbox.get_backlog()).owner.split()[1], flush=True)
            else:
                print(count(command, await queries[command]()), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""
QUERIES = ("get_backlog", "list_topics", "peek_messages")
"""Those that count the messages of the topic."""


class Peer:
    """A process that is connected to the mailbox."""

    def __init__(self, store: str, host: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER, store, str(OWNER_TIMEOUT_MS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"XDG_RUNTIME_DIR": str(host)},
        )
        assert self.answer() == "open"

    def ask(self, command: str) -> str:
        self.request(command)
        return self.answer()

    def request(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def freeze(self) -> None:
        pause(self.process.pid)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.wake()
        self.process.kill()
        self.process.communicate()


@contextmanager
def three_peers(store: str, hosts: int = 1) -> Iterator[list[Peer]]:
    """Run three processes; the first owns the mailbox.

    Arguments:
        hosts: on two, the last process finds no socket of the others.
    """
    with ExitStack() as opened:
        folders = [
            Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="postroom-"))) for _ in range(hosts)
        ]
        peers = []
        for number in range(3):
            peers.append(Peer(store, folders[number // 2 % hosts]))
            opened.callback(peers[-1].end)
        yield peers


def epochs(store: str) -> int:
    """Return the number of owners that the mailbox has had."""
    with read_mailbox(store) as reader:
        records = reader.log.read_stream(mailbox_stream(reader.log.mailbox))
        return sum(isinstance(each.event, OwnershipTaken) for each in records)


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue("postgres_store")
    return url


def test_a_process_that_calls_late_does_not_evict_the_successor_of_a_frozen_owner(store: str) -> None:
    with three_peers(store) as (owner, early, late):
        owner.freeze()
        assert early.ask("send") == "sent"
        assert late.ask("send") == "sent"
        assert epochs(store) == 2
        owner.wake()
        assert {each.ask("get_backlog") for each in (owner, early, late)} == {"2"}
        assert epochs(store) == 2


def test_a_process_that_connects_late_does_not_evict_the_successor_on_another_host(
    postgres_store: str,
) -> None:
    with three_peers(postgres_store, hosts=2) as (owner, late, elsewhere):
        owner.freeze()
        assert elsewhere.ask("send") == "sent"
        assert late.ask("send") == "sent"
        assert epochs(postgres_store) == 2
        owner.wake()
        assert owner.ask("get_backlog") == "2"


def test_code_that_blocks_the_event_loop_of_an_owners_process_delays_no_other_process(
    store: str, tmp_path: Path
) -> None:
    with three_peers(store) as (owner, *others):
        owner.request(f"block {tmp_path / 'release'}")
        assert [each.ask("send") for each in others] == ["sent", "sent"]
        (tmp_path / "release").touch()
        assert owner.answer() == "released"
        assert owner.ask("get_backlog") == "2"
        assert epochs(store) == 1


JOB = RedriveSpec(topics=("orders",))
OF_THE_LOG = {"get_message", "explain_message", "search_messages"}
OF_THE_PROCESS = {"get_mode"}
CALLS: dict[str, Callable[[OwnedMailbox], Awaitable[object]]] = {
    "get_backlog": lambda mailbox: mailbox.get_backlog(),
    "list_topics": lambda mailbox: mailbox.list_topics(),
    "describe_topic": lambda mailbox: mailbox.describe_topic("orders"),
    "list_consumers": lambda mailbox: mailbox.list_consumers(),
    "list_workers": lambda mailbox: mailbox.list_workers(),
    "report_worker": lambda mailbox: mailbox.report_worker(JOB_ID, WorkerState("shop")),
    "peek_messages": lambda mailbox: mailbox.peek_messages("orders"),
    "list_dead_letters": lambda mailbox: mailbox.list_dead_letters("orders"),
    "get_settings": lambda mailbox: mailbox.get_settings(),
    "preview_settings": lambda mailbox: mailbox.preview_settings(SettingsChanges()),
    "set_settings": lambda mailbox: mailbox.set_settings(SettingsChanges()),  # which changes nothing
    "get_topic_policy": lambda mailbox: mailbox.get_topic_policy("orders"),
    "search_unsettled": lambda mailbox: mailbox.search_unsettled(EventFilter()),
    "measure": lambda mailbox: mailbox.measure(),
    "preview_redrive": lambda mailbox: mailbox.preview_redrive(JOB),
    "start_redrive": lambda mailbox: mailbox.start_redrive(JOB),
    "list_redrives": lambda mailbox: mailbox.list_redrives(),
    "get_redrive": lambda mailbox: mailbox.get_redrive(JOB_ID),
    "list_redrive_messages": lambda mailbox: mailbox.list_redrive_messages(JOB_ID),
    "change_redrive": lambda mailbox: mailbox.change_redrive(JOB_ID, "cancel"),
    "receive_messages": lambda mailbox: mailbox.receive_messages("empty"),
    "send_message": lambda mailbox: mailbox.send_message(MESSAGE),  # a duplicate, which needs no event
    "wait_for_result": lambda mailbox: mailbox.wait_for_result("own", wait_ms=1),
    "pause_topic": lambda mailbox: mailbox.pause_topic("paused"),  # is paused already
}


@pytest.mark.parametrize("call", CALLS)
async def test_an_owner_that_was_replaced_answers_no_call_from_its_memory(tmp_path: Path, call: str) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as owner:
        await owner.send_message(MESSAGE)
        await owner.send_message(NewMessage(topic="paused", payload=b"", message_id="own"))
        await owner.pause_topic("paused")
        await owner.start_redrive(JOB, job_id=JOB_ID)
        ownership = open_store(store).ownership()
        await ownership.evict(owner.name, await ownership.incumbent(owner.name) or "")
        async with open_mailbox(store) as successor:
            with pytest.raises(Fenced):
                await CALLS[call](owner)
            with suppress(InvalidRequest):  # the job has ended, which only its owner may say
                await CALLS[call](successor)


def test_every_query_of_an_owner_is_tried_after_its_replacement() -> None:
    queries = {
        name for kind in (OwnerQueries, RedriveJobs) for name in vars(kind) if not name.startswith("_")
    }
    assert queries - set(CALLS) == OF_THE_LOG | OF_THE_PROCESS


def run_model(store: str, rounds: int, seed: int) -> None:
    """Freeze owners and others, and check that a freeze costs one take-over and every answer is current."""
    chance = random.Random(seed)
    sent = 0
    with three_peers(store) as peers:

        def call(peer: Peer) -> None:
            nonlocal sent
            for _ in range(chance.randint(1, 3)):
                if chance.random() < 0.5:
                    assert peer.ask("send") == "sent"
                    sent += 1
                else:
                    query = chance.choice(QUERIES)
                    assert (query, peer.ask(query)) == (query, str(sent))

        for number in range(rounds):
            before = epochs(store)
            owner = next(each for each in peers if str(each.process.pid) == peers[0].ask("owner"))
            others = [each for each in peers if each is not owner]
            frozen = owner if chance.random() < 0.75 else chance.choice(others)
            frozen.freeze()
            awake = [each for each in peers if each is not frozen]
            for peer in [*chance.sample(awake, 2), *chance.choices(awake, k=2)]:
                call(peer)
            query = chance.choice(QUERIES)
            frozen.request(query)
            frozen.wake()
            assert (query, frozen.answer()) == (query, str(sent))
            for peer in chance.sample(peers, 3):
                call(peer)
            taken = epochs(store) - before
            assert taken == (frozen is owner), f"round {number} of seed {seed}: {taken} take-overs"


@pytest.mark.parametrize("seed", [1])
def test_a_freeze_costs_one_take_over_and_no_answer_is_stale(store: str, seed: int) -> None:
    run_model(store, ROUNDS, seed)


def main(rounds: int, store: str) -> None:
    seed = random.randrange(1_000_000)
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="postroom-") as folder:
        run_model(store or str(Path(folder, "store.db")), rounds, seed)
    print(f"{rounds} rounds: every freeze of an owner cost one take-over, and no answer was stale")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
