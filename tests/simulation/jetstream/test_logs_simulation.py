"""Runners whose logs are in JetStream, with their adapter as it is, on virtual time and over bad servers."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from nats.errors import Error as NatsError

from postroom.adapters.jetstream.client import Outgoing, StoredMessage, StreamClient
from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.frames import Assembler
from postroom.adapters.jetstream.store_streams import token_of
from postroom.application.ports.event_log import EventLog
from postroom.domain.commit import GENESIS, Commit, verify_chain
from postroom.domain.errors import PostroomError
from tests.linearizability import defects
from tests.simulation.cluster.processes import AdminProcess, Host, RunnerProcess
from tests.simulation.cluster.test_processes_simulation import Processes
from tests.simulation.cluster.world import UnsafeStep
from tests.simulation.jetstream.network import Conditions, Link, SimulatedStreams, TurnsLoop
from tests.simulation.jetstream.servers import Servers
from tests.simulation.world import Disk
from tests.support.commits import as_appended

SEEDS = 3
MORE_SEEDS = 40
SEEDS_OF_DEFECTS = 60
SETTLE_SECONDS = 5
"""After all faults: until calls that began before have ended."""
STREAM = "LOGS"


class LeasedLog(JetStreamEventLog):
    """A log that notes appends without a lease."""

    may_append: Callable[[], bool]
    refused: list[str]

    def append(self, commits: Sequence[Commit]) -> None:
        if not self.may_append():
            self.refused.append(self.mailbox)
        super().append(commits)


class HostInJetStream(Host):
    """The store of one life of a process."""

    def __init__(self, loop: TurnsLoop, link: Link, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._link = link
        self._streams = SimulatedStreams(loop, link)

    async def log_epoch(self, mailbox: str) -> int:
        def find() -> int:
            head = JetStreamEventLog(self._streams, mailbox).head()
            return 0 if head is None else head.epoch

        return await asyncio.to_thread(find)

    async def _open_log(self, mailbox: str, may_append: Callable[[], bool]) -> EventLog:
        log = await asyncio.to_thread(LeasedLog, self._streams, mailbox)
        log.may_append, log.refused = may_append, self.appended_without_lease
        return log

    def kill(self) -> None:
        self._link.is_dead = True
        super().kill()


class RunnerInJetStream(RunnerProcess):
    """A process that owns mailboxes in JetStream."""

    cluster: "Logs"

    async def start(self) -> None:
        TurnsLoop.process.set(self)
        await super().start()

    def _new_host(self, name: str) -> Host:
        cluster = self.cluster
        link = Link(cluster.loop, cluster.servers, cluster.conditions, self.name, cluster.random)
        return HostInJetStream(cluster.loop, link, name, self._disks, self._clock, self._sent)


class _Admin(AdminProcess):
    async def start(self) -> None:
        TurnsLoop.process.set(self)
        await super().start()


class Logs(Processes):
    """A cluster whose logs are in JetStream."""

    loop: TurnsLoop
    loop_type, admin_type, runner_type = TurnsLoop, _Admin, RunnerInJetStream

    def __init__(self, seed: int, *, is_synced: bool = True) -> None:
        super().__init__(seed)
        for runner in self.runners:
            assert isinstance(runner, RunnerInJetStream)
            runner.cluster = self
        self.conditions = Conditions()
        self.servers = Servers(self.random, STREAM)
        self.servers.is_synced = is_synced

    def _break_network(self) -> None:
        super()._break_network()
        chance = self.random
        self.conditions.loss = chance.choice((0.0, 0.02, 0.1))
        self.conditions.late = chance.choice((0.0, 0.05, 0.2))
        self.servers.lag = chance.choice((0.0, 0.5))
        self.servers.loss = chance.choice((0.0, 0.5))

    async def _fault(self) -> None:
        chance = self.random.random()
        if chance < 0.15:
            self.servers.cut_power()
        elif chance < 0.4:
            name = self.random.choice(self.runners).name
            self.conditions.cut_off.add(name)
            self._later(self.random.random() * 2.5, self._reach, name)
        else:
            await super()._fault()
            for (
                clock
            ) in self.clocks:  # with clocks that were set, messages do not expire, and soon none is sent
                clock.skew = 0

    async def _reach(self, name: str) -> None:
        self.conditions.cut_off.discard(name)

    async def _heal(self) -> None:
        self.conditions.loss = self.conditions.late = 0.0  # replicas lag, and pages have gaps, as before
        self.conditions.cut_off.clear()
        await super()._heal()
        await asyncio.sleep(SETTLE_SECONDS)

    def _check(self) -> None:
        for mailbox in self.disks:
            self.disks[mailbox] = self._read(mailbox)
        super()._check()

    def _read(self, mailbox: str) -> Disk:
        """Return a log as the servers have it."""
        disk, assembler = Disk(mailbox), Assembler()
        appends = [
            assembler.add(StoredMessage(each.subject, each.sequence, each.data))
            for each in self.servers.streams[STREAM].matching(f"{STREAM}.{token_of(mailbox)}")
        ]
        commits = [stored.commit() for each in appends if each is not None for stored in each.commits]
        try:
            verify_chain(commits, GENESIS, 1)
            disk.append(as_appended(commits))
        except PostroomError as error:
            raise AssertionError(f"the log is sound: {error}") from error
        return disk


def run_all(seeds: Iterable[int], *, is_synced: bool = True) -> None:
    for seed in seeds:
        try:
            Logs(seed, is_synced=is_synced).run()
        except AssertionError as error:
            raise UnsafeStep(f"Seed {seed}: {error}") from error


def test_logs_in_jetstream_keep_what_was_acknowledged() -> None:
    run_all(range(SEEDS))


@pytest.mark.extended
def test_logs_in_jetstream_keep_what_was_acknowledged_in_many_runs() -> None:
    run_all(range(SEEDS, MORE_SEEDS))


def test_a_simulation_of_logs_in_jetstream_is_the_same_in_each_run() -> None:
    first, second = Logs(1), Logs(1)
    first.run()
    second.run()
    assert first.sent == second.sent
    assert first.servers.streams[STREAM].messages == second.servers.streams[STREAM].messages


def omit_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamClient, "_publish", StreamClient._publish)  # it is put back afterwards
    defects.omit_fence()


def believe_unknown_outcomes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamClient, "_publish", StreamClient._publish)  # it is put back afterwards
    defects.believe_unknown_outcomes()


def append_after_any_message(patch: pytest.MonkeyPatch) -> None:
    """Repeat a publish whose outcome is unknown after the message that is the last one by then."""
    publish = StreamClient._publish

    async def publish_after_last(self: StreamClient, messages: Sequence[Outgoing], deadline: float) -> int:
        try:
            return await publish(self, messages, deadline)
        except (NatsError, TimeoutError):
            last = await self.last(messages[0].subject, deadline)
            first = messages[0]._replace(expected=last.sequence if last else 0)
            return await publish(self, [first, *messages[1:]], deadline)

    patch.setattr(StreamClient, "_publish", publish_after_last)


@pytest.mark.parametrize("plant", [omit_fence, believe_unknown_outcomes, append_after_any_message])
def test_a_defect_of_the_adapter_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(UnsafeStep):
        run_all(range(SEEDS_OF_DEFECTS))


def test_servers_that_do_not_sync_are_found() -> None:
    with pytest.raises(UnsafeStep, match=r"no acknowledged message is lost|the log is sound"):
        run_all(range(SEEDS_OF_DEFECTS), is_synced=False)
