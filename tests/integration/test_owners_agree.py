"""The same calls have the same answers whichever process owns the mailbox, and however owners change.

Processes share a mailbox by `connect`, with the settings of the mailbox, with none or with others; they
leave, are killed and are paused. Each call is also made in a mailbox in memory that has one owner throughout.
"""

import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from select import select
from typing import Any
from uuid import UUID

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from postroom.domain.message import ON_CONFLICT
from tests.integration.sharing_process import Calls
from tests.support.fixtures import CreateDatabase
from tests.support.fork_server import popen
from tests.support.servers.process import pause
from tests.support.waiting import SECONDS

PROCESSES = 3
HOUR_MS = 3_600_000
TOPICS = ("orders", "payments.eu")
SUBSCRIPTION = "mail"
"""Gets copies of the messages of the first topic."""
POLICY = {"shards": 2, "visibility_ms": HOUR_MS, "replay_window_ms": 3 * HOUR_MS, "max_attempts": 3}
LIMITS = {"in_flight_ceiling": 1_000}
OTHER_SETTINGS: tuple[tuple[Any, Any], ...] = (
    ({**POLICY, "max_attempts": 1}, None),
    ({**POLICY, "shards": 3}, None),
    ({**POLICY, "dead_capacity": 1}, None),
    ({**POLICY, "replay_capacity": 1}, None),
    ({**POLICY, "visibility_ms": 250, "replay_window_ms": 500}, LIMITS),
    (None, {"in_flight_ceiling": 1}),
)
"""Policies and limits, each of which would change an answer if it were obeyed."""

UNORDERED = {"ordered_keys": False, "dead_letters_hold_keys": False, "key_batch": 1}
POLICIES: tuple[Any, ...] = (
    UNORDERED,
    {**UNORDERED, "ordered_keys": True},
    {**UNORDERED, "ordered_keys": True, "key_batch": 2},
    {"ordered_keys": True, "dead_letters_hold_keys": True, "key_batch": 3},
)
"""Orders of keys; neither log time nor the turns of an owner decides what they allow to deliver."""

topics = st.sampled_from(TOPICS)
queues = st.sampled_from((*TOPICS, SUBSCRIPTION))
processes = st.integers(0, PROCESSES - 1)
keys = st.none() | st.sampled_from(("a", "b", "c"))


class Process:
    """A process that shares the mailbox, started when it is first needed and again after its end."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self.is_open = self.is_paused = False

    @property
    def pid(self) -> int:
        return self._running().pid

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the answer to a call.

        Raises: TimeoutError when there is none in time, EOFError when the process ended.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps([name, *arguments]).encode() + b"\n")
        process.stdin.flush()
        if not select([process.stdout], [], [], SECONDS)[0]:
            raise TimeoutError(f"{name} was not answered within {SECONDS} s.")
        line = process.stdout.readline()
        if not line:
            raise EOFError(f"The process ended with {process.wait()} instead of an answer to {name}.")
        return json.loads(line)

    def pause(self) -> None:
        pause(self._running().pid)
        self.is_paused = True

    def resume(self) -> None:
        self._running().send_signal(signal.SIGCONT)
        self.is_paused = False

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self.is_open, self.is_paused = None, False, False

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._process = popen(
                [sys.executable, "-m", "tests.integration.sharing_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        return self._process


class Owners(RuleBasedStateMachine):
    """Processes that share a mailbox, beside a mailbox with one owner.

    A message's payload is its number, topic and key, so that answers of both can be compared.
    """

    pool: list[Process]
    open_store: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        self.store = self.open_store()
        self.reference = Calls()
        self.runner = asyncio.Runner()
        self.numbers = count()
        self.receipts: dict[tuple[str, str], tuple[str, str]] = {}
        """Receipts of the last delivery of each message: of the processes, and of the reference."""
        self.ids: list[str] = []

    def teardown(self) -> None:
        for process in self.pool:
            if process.is_paused:
                process.resume()
        for process in self.pool:
            if process.is_open:
                process.call("close")
                process.is_open = False
        self.runner.run(self.reference.close())
        self.runner.close()

    def refer(self, name: str, *arguments: Any) -> Any:
        return self.runner.run(self.reference.make(name, *arguments))

    def caller(self, number: int) -> Process:
        """Return a process that can call: this one, or the next that is not paused, after connecting it."""
        running = [each for each in self.pool[number:] + self.pool[:number] if not each.is_paused]
        if not running[0].is_open:
            assert running[0].call("open", self.store, None, None) == "open"
            running[0].is_open = True
        return running[0]

    def owner(self, caller: int) -> Process | None:
        """Return the process that owns the mailbox."""
        pid = re.search(r"process (\d+)", self.caller(caller).call("owner"))
        return next((each for each in self.pool if pid and each.pid == int(pid[1])), None)

    @initialize(process=processes)
    def create(self, process: int) -> None:
        assert self.pool[process].call("open", self.store, POLICY, LIMITS) == "open"
        self.pool[process].is_open = True
        assert self.refer("open", "memory:", POLICY, LIMITS) == "open"
        call = ("subscribe", SUBSCRIPTION, TOPICS[0])
        assert self.pool[process].call(*call) == self.refer(*call)

    # -- processes come and go ---

    @rule(process=processes, given=st.sampled_from([(None, None), (POLICY, None), (None, LIMITS)]))
    def connect(self, process: int, given: tuple[Any, Any]) -> None:
        new = self.pool[process]
        if not new.is_open:
            assert new.call("open", self.store, *given) == "open"
            new.is_open = True

    @rule(process=processes, given=st.sampled_from(OTHER_SETTINGS))
    def connect_with_other_settings(self, process: int, given: tuple[Any, Any]) -> None:
        new = self.pool[process]
        if not new.is_open:
            answer = new.call("open", self.store, *given)
            new.is_open = answer == "open"
            assert answer == "SettingsConflict"

    @rule(process=processes)
    def leave(self, process: int) -> None:
        leaving = self.pool[process]
        if leaving.is_open and not leaving.is_paused:
            assert leaving.call("close") == "closed"
            leaving.is_open = False

    @rule(caller=processes)
    def kill_the_owner(self, caller: int) -> None:
        owner = self.owner(caller)
        if owner is not None:
            owner.kill()

    @precondition(lambda self: not any(each.is_paused for each in self.pool))
    @rule(caller=processes)
    def pause_the_owner(self, caller: int) -> None:
        owner = self.owner(caller)
        if owner is not None:
            owner.pause()

    @rule()
    def resume(self) -> None:
        for process in self.pool:
            if process.is_paused:
                process.resume()

    # -- calls ---

    @rule(caller=processes, topic=topics, idem_key=keys, sticky_key=keys)
    def send(self, caller: int, topic: str, idem_key: str | None, sticky_key: str | None) -> None:
        payload = f"{next(self.numbers)} {topic} {sticky_key}"
        call = ("send", topic, payload, {"idem_key": idem_key, "sticky_key": sticky_key})
        assert self.caller(caller).call(*call) == self.refer(*call)

    @rule(
        caller=processes,
        topic=topics,
        sticky_key=keys,
        unique_key=st.sampled_from((None, "u", "v")),
        conflict=st.sampled_from(ON_CONFLICT),
    )
    def send_with_an_id(
        self, caller: int, topic: str, sticky_key: str | None, unique_key: str | None, conflict: str
    ) -> None:
        number = next(self.numbers)
        fields = {"message_id": str(UUID(int=number)), "sticky_key": sticky_key}
        if unique_key is not None:
            fields |= {"unique_key": unique_key, "on_conflict": conflict}
        call = ("send", topic, f"{number} {topic} {sticky_key}", fields)
        assert self.caller(caller).call(*call) == self.refer(*call)
        self.ids.append(str(UUID(int=number)))

    @precondition(lambda self: self.ids)
    @rule(caller=processes, choice=st.integers(0, 1_000))
    def cancel(self, caller: int, choice: int) -> None:
        call = ("cancel", self.ids[choice % len(self.ids)])
        assert self.caller(caller).call(*call) == self.refer(*call)

    @rule(caller=processes, topic=queues, policy=st.sampled_from(POLICIES))
    def set_policy(self, caller: int, topic: str, policy: Any) -> None:
        call = ("set_policy", topic, policy)
        assert self.caller(caller).call(*call) == self.refer(*call)

    @rule(caller=processes, topic=topics, sticky_key=keys, idem_key=st.sampled_from(("d", "e")))
    def send_twice(self, caller: int, topic: str, sticky_key: str | None, idem_key: str) -> None:
        fields = {"idem_key": idem_key, "sticky_key": sticky_key}
        call = ("send", topic, f"{topic} {sticky_key} {idem_key}", fields)
        assert self.caller(caller).call(*call) == self.refer(*call)

    @rule(caller=processes, topic=queues)
    def receive(self, caller: int, topic: str) -> None:
        """Receive all ready messages; shards take turns, so only the messages of a key are in order.

        If the owner changes after it has delivered them, its answer may be lost: they are in flight then.
        """
        received, owner_changed = self.caller(caller).call("receive", topic, 100)
        expected, _ = self.refer("receive", topic, 100)
        assert _by_key(received) == _by_key(expected) or (owner_changed and not received)
        references = {payload: receipt for payload, _, receipt in expected}
        self.receipts |= {
            (topic, payload): (receipt, references[payload]) for payload, _, receipt in received
        }

    @precondition(lambda self: self.receipts)
    @rule(caller=processes, name=st.sampled_from(("ack", "nack")), choice=st.integers(0, 1_000))
    def settle(self, caller: int, name: str, choice: int) -> None:
        receipt, reference = list(self.receipts.values())[choice % len(self.receipts)]
        assert self.caller(caller).call(name, receipt) == self.refer(name, reference)

    @rule(caller=processes, topic=queues)
    def redrive(self, caller: int, topic: str) -> None:
        """Redrive all dead letters; a call whose outcome is unknown is not repeated by `connect` but here."""
        process, expected = self.caller(caller), self.refer("redrive", topic)
        answer = process.call("redrive", topic)
        if answer != "Unavailable":
            assert answer == expected
        while answer == "Unavailable":
            answer = process.call("redrive", topic)

    @rule(caller=processes)
    def look(self, caller: int) -> None:
        process = self.caller(caller)
        for call in (("backlog",), *(("dead_letters", topic) for topic in (*TOPICS, SUBSCRIPTION))):
            assert process.call(*call) == self.refer(*call)


def _by_key(received: list[tuple[str, int, str]]) -> dict[str, list[tuple[str, int]]]:
    """Return payloads and attempts in the order in which they were received, by topic and key."""
    messages: dict[str, list[tuple[str, int]]] = {}
    for payload, attempt, _ in received:
        messages.setdefault(payload.split(" ", 1)[1], []).append((payload, attempt))
    return messages


@pytest.fixture(scope="module")
def pool() -> Iterator[list[Process]]:
    processes = [Process() for _ in range(PROCESSES)]
    yield processes
    for process in processes:
        process.kill()


def _run(pool: list[Process], open_store: Callable[[], str], share: int) -> None:
    """Try one of `share` examples of the profile, each on a store of its own."""
    machine = type("SharedOwners", (Owners,), {"pool": pool, "open_store": staticmethod(open_store)})
    # Each step takes real processes, so a history that fails is shown as it is instead of a shorter one.
    phases = (Phase.explicit, Phase.generate)
    run_machine(machine, settings=settings(max_examples=settings().max_examples // share, phases=phases))


def test_all_owners_of_a_file_give_the_same_answers(pool: list[Process]) -> None:
    stores = count()
    with tempfile.TemporaryDirectory() as folder:
        _run(pool, lambda: f"{folder}/{next(stores)}.db", 4)


def test_all_owners_of_a_database_give_the_same_answers(
    pool: list[Process], create_database: CreateDatabase, postgres_store_template: str
) -> None:
    _run(pool, lambda: create_database(postgres_store_template), 10)
