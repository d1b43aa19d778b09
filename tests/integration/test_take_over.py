"""Processes that share a mailbox by `connect`, while its owner is killed or paused.

    python -m tests.integration.test_take_over COUNT [STORE]

runs four processes that send COUNT messages each, and prints how long take-overs took: from the kill of the
owner to the answer of the first call that began after it. STORE is a path, the URL of a database that was
migrated, or `postgresql` for a server of its own.
"""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from postroom import (
    NewMessage,
    PostroomError,
    SubscriptionFilter,
    Unavailable,
    connect,
    read_mailbox,
)
from postroom.adapters.postgres.migrate import migrate
from postroom.adapters.postgres.url import is_url
from postroom.application.mailbox.stored_snapshots import fold
from postroom.domain.envelope.build import open_envelope
from postroom.domain.mailbox.events import OwnershipTaken
from postroom.domain.message import MessageAcked, MessageReceived, MessageRequeued, MessageSent
from postroom.domain.names import mailbox_stream
from postroom.domain.subscription import SubscriptionAdvanced
from tests.simulation.subscriptions import Reference
from tests.support.fork_server import popen
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.process import pause
from tests.support.waiting import SECONDS

KILL_SECONDS = 1.0
DEADLINE_SECONDS = 600.0
SECONDS_PER_MESSAGE = 0.2
OWNER_TIMEOUT_MS = 500
WORKERS = 4
PHASES = (
    ("mailbox.owner_replaced .*is_here=True", "gap_ms", "ms"),
    ("mailbox.owned", "load_ms", "ms"),
    ("mailbox.owned", "append_ms", "ms"),
    ("mailbox.owned", "replayed", "records"),
)


class Journal(NamedTuple):
    """What the processes were answered."""

    sent: set[str]
    got: list[tuple[str, int]]
    acked: dict[str, int]
    calls: list[tuple[int, int]]

    @classmethod
    def read(cls, folder: Path) -> "Journal":
        journal = cls(set(), [], {}, [])
        for path in folder.glob("*.journal"):
            for line in path.read_text("utf-8").splitlines():
                match line.split():
                    case ["sent", id_]:
                        journal.sent.add(id_)
                    case ["got", id_, at]:
                        journal.got.append((id_, int(at)))
                    case ["acked", id_, at]:
                        journal.acked[id_] = min(int(at), journal.acked.get(id_, int(at)))
                    case ["call", start, end]:
                        journal.calls.append((int(start), int(end)))
        return journal


class Processes:
    """The workers of one mailbox; one that was killed is started again."""

    def __init__(self, store: str, folder: Path, count: int) -> None:
        self.store, self.folder, self.count = store, folder, count
        self.stop = folder / "stop"
        self.kills: list[int] = []
        self._read: dict[Path, int] = {}
        self._sent: set[Path] = set()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        # On a database, half of the workers find no socket of the others, as on another host.
        self._hosts = [tempfile.TemporaryDirectory(prefix="postroom-") for _ in range(1 + is_url(store))]
        for number in range(WORKERS):
            self.start(f"worker-{number}")

    def start(self, name: str) -> None:
        host = self._hosts[int(name.rpartition("-")[2]) % len(self._hosts)]
        environment = os.environ | {"XDG_RUNTIME_DIR": host.name}
        journal = self.folder / f"{name}.journal"
        command: list[str | Path] = [
            sys.executable,
            "-m",
            "tests.integration.take_over_worker",
            self.store,
            journal,
            name,
        ]
        with (self.folder / f"{name}.log").open("ab") as log:
            self._running[name] = popen(
                [*command, str(self.count), self.stop], env=environment, stdout=log, stderr=log
            )

    def kill_owner(self) -> None:
        """Kill the process that owns the mailbox, if it is one of these, and start it again."""
        owner = owner_pid(self.store)
        for name, process in self._running.items():
            if process.pid == owner and process.poll() is None:
                self.kills.append(time.monotonic_ns())
                process.kill()
                process.wait(SECONDS)
                self.start(name)
                return

    def is_done(self) -> bool:
        """Return whether every number was sent, every message settled, and every subscription live."""
        for path in set(self.folder.glob("*.journal")) - self._sent:
            with path.open("rb") as journal:
                journal.seek(max(0, self._read.get(path, 0) - 100))  # a line that was written in part
                if f"sending {self.count - 1}\n".encode() in journal.read():
                    self._sent.add(path)
                self._read[path] = journal.tell()
        if len(self._sent) < WORKERS:
            return False
        with read_mailbox(self.store) as reader:
            if any(s.ready or s.delayed or s.in_flight for s in reader.get_backlog().shards):
                return False
            return all(each.is_live for each in fold(reader.log).subscriptions.values())

    def end(self) -> None:
        self.stop.touch()
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait(SECONDS)
        for host in self._hosts:
            host.cleanup()


def owner_pid(store: str) -> int:
    """Return the process that owns the mailbox according to its log; 0 if there is none yet."""
    with suppress(PostroomError), read_mailbox(store) as reader:
        for record in reversed(reader.log.read_stream(mailbox_stream(reader.log.mailbox))):
            if isinstance(record.event, OwnershipTaken):
                return int(record.event.owner.split()[1])
    return 0


def run(store: str, folder: Path, count: int) -> tuple[Journal, list[float]]:
    """Run the workers until all is sent and settled; return the journal and the take-overs in seconds."""
    processes = Processes(store, folder, count)
    try:
        deadline = time.monotonic() + max(DEADLINE_SECONDS, SECONDS_PER_MESSAGE * count)
        next_kill = time.monotonic() + KILL_SECONDS
        while not processes.is_done():
            assert time.monotonic() < deadline, (folder / "worker-0.log").read_text("utf-8")[-2_000:]
            if time.monotonic() >= next_kill:
                processes.kill_owner()
                next_kill = time.monotonic() + KILL_SECONDS
            time.sleep(0.2)
    finally:
        processes.end()
    journal = Journal.read(folder)
    assert processes.kills, "all was settled before a process was killed"
    take_overs = []
    for kill in processes.kills:
        ends = [end for start, end in journal.calls if start > kill]
        take_overs += [(min(ends) - kill) / 1e9] if ends else []
    return journal, take_overs


def check(store: str, journal: Journal, count: int) -> None:
    """Check that nothing that was acknowledged is lost, doubled, or delivered after its ack."""
    with read_mailbox(store) as reader:
        verification = reader.verify_log()
        payloads: Counter[bytes] = Counter()
        lost = [id_ for id_ in journal.sent if reader.get_message(id_).status != "acked"]
        copies = 0
        for record in reader.log.read():
            if isinstance(record.event, MessageSent):
                if record.event.copy_of is None:
                    payloads[open_envelope(record.event.envelope).payload] += 1
                else:
                    copies += 1
    assert not lost, f"{len(lost)} messages that were sent are not settled: {lost[:3]}"
    assert verification.messages - copies == sum(payloads.values()) >= len(journal.sent)
    assert max(payloads.values()) == 1, payloads.most_common(3)
    assert len(payloads) <= WORKERS * count
    late = [id_ for id_, asked in journal.got if asked > journal.acked.get(id_, asked)]
    assert not late, f"{len(late)} messages were delivered after their ack: {late[:3]}"


PATIENT = {"max_attempts": 1_000}
"""Processes are killed about as often as a delivery times out."""
ORDERED = {**PATIENT, "ordered_keys": True, "fair_keys": True, "max_in_flight": 12, "shards": 4}
KEY_BATCH = {"orders": 1, "mail": 3}


async def set_policy(store: str) -> None:
    """Have ordered keys and a limit in the topic, and three subscriptions; one soon lacks room."""
    async with connect(store) as mailbox:
        for name, most in KEY_BATCH.items():
            await mailbox.set_topic_policy(name, {**ORDERED, "key_batch": most})
        await mailbox.set_topic_policy("audit", PATIENT)
        await mailbox.set_topic_policy("small", {**PATIENT, "shards": 1, "shard_capacity": 4})
        for name, pattern in (("mail", "orders"), ("audit", "*"), ("small", "ord*")):
            await mailbox.set_subscription(name, SubscriptionFilter((pattern,)))


def check_order(store: str) -> int:
    """Check in the log that keys were served in order, in their batches; return the most in flight."""
    keys: dict[bytes, tuple[str, str]] = {}
    unsettled: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
    in_flight: defaultdict[str, set[bytes]] = defaultdict(set)
    most = longest = 0
    with read_mailbox(store) as reader:
        for record in reader.log.read():
            event = record.event
            if isinstance(event, MessageSent) and event.topic in KEY_BATCH:
                assert event.sticky_key is not None
                key = keys[event.stream] = event.topic, event.sticky_key
                unsettled[key].append(event.stream)
            if event.stream not in keys:
                continue
            key = keys[event.stream]
            if isinstance(event, MessageReceived):
                earlier = unsettled[key][: unsettled[key].index(event.stream)]
                assert in_flight[key[0]].issuperset(earlier), f"{event.stream.hex()} was delivered too early"
                assert len(earlier) < KEY_BATCH[key[0]], f"{event.stream.hex()} is in too long a batch"
                longest = max(longest, len(earlier) + 1)
                in_flight[key[0]].add(event.stream)
                most = max(most, len(in_flight[key[0]]))
            elif isinstance(event, MessageRequeued):
                in_flight[key[0]].discard(event.stream)
            elif isinstance(event, MessageAcked):
                in_flight[key[0]].discard(event.stream)
                assert unsettled[key].pop(0) == event.stream
    assert most <= ORDERED["max_in_flight"], f"{most} messages were in flight"
    assert longest > 1, "no key was delivered in batches"
    return most


def check_copies(store: str) -> str:
    """Check in the log that no subscription misses or doubles a message; return what it says of them."""
    with read_mailbox(store) as reader:
        records = list(reader.log.read())
    reference = Reference()
    reference.follow(records)
    events = [each.event for each in records]
    advanced = Counter(each.subscription for each in events if isinstance(each, SubscriptionAdvanced))
    for each in reference.subscriptions.values():
        assert reference.next_of(each) is None, f"{each.name} lacks {reference.next_of(each)}"
    assert advanced["small"], "no subscription lacked room"
    return f"{len(reference.originals)} messages, {len(reference.copies)} copies, {dict(advanced)} advances"


@pytest.mark.extended
def test_order_limits_and_subscriptions_hold_while_owners_are_killed(store: str, tmp_path: Path) -> None:
    asyncio.run(set_policy(store))
    count = 600
    journal, take_overs = run(store, tmp_path, count)
    check(store, journal, count)
    most, copies = check_order(store), check_copies(store)
    print(f"{len(take_overs)} take-overs, {most} messages in flight, {copies}: {sorted(take_overs)}")


@pytest.fixture(params=["sqlite", "postgres", pytest.param("jetstream", marks=pytest.mark.extended)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return str(tmp_path / "store.db")
    url: str = request.getfixturevalue(f"{request.param}_store")
    return url


def test_nothing_is_lost_doubled_or_delivered_after_its_ack_while_owners_are_killed(
    store: str, tmp_path: Path
) -> None:
    count = 300
    journal, take_overs = run(store, tmp_path, count)
    check(store, journal, count)
    print(f"{len(take_overs)} take-overs: {sorted(take_overs)}")


OWN = """
import asyncio, sys
from postroom import NewMessage, PostroomError, connect, open_mailbox

opening, store = sys.argv[1:]

async def main():
    async with {"own": open_mailbox, "connect": connect}[opening](store) as mailbox:
        print("open", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            try:
                await mailbox.send_message(NewMessage(topic="orders", payload=line.strip().encode()))
                print("sent", flush=True)
            except PostroomError as error:
                print(type(error).__name__, flush=True)

asyncio.run(main())
"""


class Owner:
    """A process that owns the mailbox and sends what it is told."""

    def __init__(self, opening: str, store: str, host: Path | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN, opening, store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ if host is None else os.environ | {"XDG_RUNTIME_DIR": str(host)},
        )
        assert self.answer() == "open"

    def send(self, payload: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{payload}\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.communicate()


async def send_beside_a_paused_owner(store: str, owner: Owner) -> list[bytes]:
    """Send one message through the owner and one while it is paused; return what is received of all three."""
    async with connect(store, owner_timeout_ms=OWNER_TIMEOUT_MS) as mailbox:
        await mailbox.send_message(NewMessage(topic="orders", payload=b"to the first owner"))
        assert (await mailbox.get_backlog()).owner.startswith(f"process {owner.process.pid} ")
        pause(owner.process.pid)
        await mailbox.send_message(NewMessage(topic="orders", payload=b"to the second owner"))
        assert (await mailbox.get_backlog()).owner.startswith(f"process {os.getpid()} ")
        os.kill(owner.process.pid, signal.SIGCONT)
        answer = await asyncio.to_thread(owner.send, "by the first owner, awake again")
        messages = [each.payload for each in await mailbox.receive_messages("orders")]
        await mailbox.send_message(NewMessage(topic="orders", payload=b"afterwards"))
    return [answer.encode(), *messages]


@pytest.mark.parametrize(
    ("opening", "outcome"),
    [
        ("own", [b"Fenced", b"to the first owner", b"to the second owner"]),
        (
            "connect",
            [b"sent", b"to the first owner", b"to the second owner", b"by the first owner, awake again"],
        ),
    ],
)
def test_a_paused_owner_is_replaced_and_can_no_longer_write_when_it_wakes(
    store: str, opening: str, outcome: list[bytes]
) -> None:
    owner = Owner(opening, store)
    try:
        assert asyncio.run(send_beside_a_paused_owner(store, owner)) == outcome
    finally:
        owner.end()
    with read_mailbox(store) as reader:
        assert reader.verify_log().messages == len(outcome)


def test_a_paused_owner_on_another_host_is_replaced(postgres_store: str) -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-") as host:
        owner = Owner("connect", postgres_store, Path(host))
        try:
            answer, *messages = asyncio.run(send_beside_a_paused_owner(postgres_store, owner))
        finally:
            owner.end()
    assert answer == b"sent"
    assert messages == [b"to the first owner", b"to the second owner", b"by the first owner, awake again"]


async def test_calls_go_on_when_the_owner_leaves_and_another_takes_over(store: str) -> None:
    first, second, third = connect(store), connect(store), connect(store)
    owner = await first.__aenter__()
    async with second as mailbox, third as other:
        await owner.send_message(NewMessage(topic="orders", payload=b"1"))
        (received,) = await mailbox.receive_messages("orders")
        waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=30_000))
        await asyncio.sleep(0.1)
        await first.__aexit__(None, None, None)
        await received.ack()
        await other.send_message(NewMessage(topic="orders", payload=b"2"))
        assert [each.payload for each in await waiting] == [b"2"]
        with pytest.raises(Unavailable, match="is closed"):
            await owner.send_message(NewMessage(topic="orders", payload=b"3"))
        assert (await other.get_backlog()).epoch == 2


def logged(folder: Path, event: str, field: str) -> list[int]:
    """Return the values of a field in the log events of the processes."""
    pattern = re.compile(rf"{event} .*\b{field}=(\d+)")
    logs = [path.read_text("utf-8") for path in folder.glob("*.log")]
    return [int(value) for text in logs for value in pattern.findall(text)]


def summary(values: Sequence[float], unit: str) -> str:
    ordered = sorted(values) or [0]
    p99 = ordered[math.ceil(0.99 * len(ordered)) - 1]
    median = ordered[len(ordered) // 2]
    return f"median {median:,.0f} {unit}, p99 {p99:,.0f} {unit}, longest {ordered[-1]:,.0f} {unit}"


def main(count: int, store: str) -> None:
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="postroom-")))
        address = store or str(folder / "store.db")
        if store == "postgresql":
            server = opened.enter_context(PostgresServer(folder / "server"))
            address = server.create_database()
            migrate(address, "store")
        began = time.monotonic()
        journal, take_overs = run(address, folder, count)
        seconds = time.monotonic() - began
        check(address, journal, count)
        print(
            f"{len(journal.sent):,} of {WORKERS * count:,} sends were answered; their messages are settled "
            f"after {seconds:.0f} s, none lost, doubled, or delivered after its ack"
        )
        print(f"{len(take_overs)} take-overs: {summary([1_000 * each for each in take_overs], 'ms')}")
        for event, field, unit in PHASES:
            print(f"{event.partition(' ')[0]} {field}: {summary(logged(folder, event, field), unit)}")
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "")
