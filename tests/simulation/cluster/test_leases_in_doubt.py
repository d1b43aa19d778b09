"""`Leases` of several admins over one store whose answers get lost: what they say is true."""

from random import Random
from typing import Any
from uuid import UUID

import pytest
from eventsourcing.persistence import OperationalError

from postroom.adapters.memory.lease_store import MemoryLeaseRecorder
from postroom.application.leases.lease_table import LeaseTable
from postroom.application.leases.leases import Leases
from postroom.domain.errors import LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease.lease import (
    AcquireLease,
    ExpireLease,
    Lease,
    LeaseCommand,
    ReleaseLease,
    RenewLease,
    evolve,
)
from tests.simulation.cluster.doubtful_store import DoubtfulRecorder
from tests.simulation.cluster.promises import Promises
from tests.simulation.cluster.world import UnsafeStep, World

SEEDS = 300
STEPS = 40
MAILBOX = "orders@p"


class Admins:
    """Two admins that share a store, and three runners that ask either."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.recorder = DoubtfulRecorder(self.random)
        self.recorder.doubt = self.random.choice((0.0, 0.1, 0.4))
        self.recorder.conflict = self.random.choice((0.0, 0.2))
        self.recorder.rival = self.step
        self.admins = [Leases(self.recorder, lambda: 1), Leases(self.recorder, lambda: 2)]
        self.promises = Promises(World(seed), [], is_bounded=True)
        self.lease: Lease | None = None
        self.position = 0
        self.seen: list[Lease | None] = []

    def run(self) -> None:
        for _ in range(STEPS):
            self.step()
        self.recorder.record_late_events()
        self.follow()
        tables = [LeaseTable(lambda: 0) for _ in range(2)]
        for table, page in zip(tables, (1, 1_000), strict=True):
            while events := self.admins[0].read_events(table.position, page):
                table.apply(events)
        self.recorder.remove_old_events()
        late = LeaseTable(lambda: 0)
        late.apply(self.admins[1].read_events(0))
        assert tables[0].leases() == tables[1].leases() == late.leases() == [self.lease]
        routes = [[(each.mailbox, each.epoch) for each in table.routes.routes()] for table in (*tables, late)]
        assert routes[0] == routes[1] == routes[2]

    def step(self) -> None:
        command = self.command()
        admin = self.random.choice(self.admins)
        try:
            state = self.carry_out(admin, command)
        except Unavailable:
            return
        except (LeaseHeld, LeaseLost):
            self.follow()
            self.promises.check_refused(command, self.lease)
            return
        self.follow()
        if state is not None:
            assert state in self.seen, f"{command} was answered with a lease that is not in the log: {state}"

    def carry_out(self, admin: Leases, command: LeaseCommand) -> Lease | None:
        match command:
            case AcquireLease():
                return admin.acquire(command)
            case RenewLease():
                return admin.renew(command)
            case ReleaseLease():
                return admin.release(command)
            case ExpireLease():
                return admin.expire(command)

    def command(self) -> LeaseCommand:
        random = self.random
        runner = f"runner{random.randrange(3)}"
        epoch = max(1, (self.lease.epoch if self.lease else 0) - random.choice((0, 0, 1)))
        if random.random() < 0.25:
            acquisition = str(UUID(int=random.randrange(1, 6), version=4))
            return AcquireLease(MAILBOX, runner, "p", "host:1", acquisition, random.randrange(3), 1_000, 100)
        if random.random() < 0.25:
            return ExpireLease(MAILBOX, self.lease.version if self.lease else 1)
        kind = random.choice((RenewLease, ReleaseLease))
        return (
            RenewLease(MAILBOX, runner, epoch) if kind is RenewLease else ReleaseLease(MAILBOX, runner, epoch)
        )

    def follow(self) -> None:
        """Check the promises of every event that was recorded since."""
        for each in self.admins[0].read_events(self.position):
            assert each.position == self.position + 1
            self.position = each.position
            event: Any = each.event
            self.promises.check(self.lease, event)
            self.lease = evolve(self.lease, event)
            self.seen.append(self.lease)


def run_all() -> None:
    for seed in range(SEEDS):
        try:
            Admins(seed).run()
        except AssertionError as error:
            raise UnsafeStep(f"Seed {seed}: {error!r}") from error


def test_what_admins_answer_is_in_the_log_and_what_they_refuse_is_not() -> None:
    run_all()


def test_an_admin_that_takes_a_lost_answer_for_a_failure_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = DoubtfulRecorder.insert_events

    def believe_it_failed(self: DoubtfulRecorder, events: Any, **kwargs: Any) -> Any:
        try:
            return insert(self, events, **kwargs)
        except OperationalError as error:
            raise LeaseLost(MAILBOX, "it failed") from error

    monkeypatch.setattr(DoubtfulRecorder, "insert_events", believe_it_failed)
    with pytest.raises(UnsafeStep, match="a refused command changes nothing"):
        run_all()


def test_an_admin_that_takes_a_lost_answer_for_a_success_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = DoubtfulRecorder.insert_events

    def believe_it_is_done(self: DoubtfulRecorder, events: Any, **kwargs: Any) -> Any:
        try:
            return insert(self, events, **kwargs)
        except OperationalError:
            return [1]

    monkeypatch.setattr(DoubtfulRecorder, "insert_events", believe_it_is_done)
    with pytest.raises(UnsafeStep, match="not in the log"):
        run_all()


def test_a_log_that_takes_two_events_of_one_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = MemoryLeaseRecorder.insert_events

    def insert_anyway(self: Any, events: Any, **kwargs: Any) -> Any:
        if not events:
            return insert(self, events, **kwargs)
        newest = self.select_events(events[0].originator_id, desc=True, limit=1)
        version = newest[0].originator_version if newest else 0
        moved = [
            type(event)(event.originator_id, version + n, event.topic, event.state)
            for n, event in enumerate(events, 1)
        ]
        return insert(self, moved, **kwargs)

    monkeypatch.setattr(MemoryLeaseRecorder, "insert_events", insert_anyway)
    with pytest.raises(UnsafeStep):
        run_all()
