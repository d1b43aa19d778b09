"""Concurrent changes of leases are linearizable, also where a store leaves its writers in doubt."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from eventsourcing.persistence import OperationalError, StoredEvent

from postroom.application.leases import leases as leases_module
from postroom.application.leases.leases import Leases
from postroom.domain.errors import LeaseHeld, LeaseLost, Unavailable
from postroom.domain.lease import lease as lease_rules
from postroom.domain.lease.lease import AcquireLease, ExpireLease, ReleaseLease, RenewLease
from tests.linearizability.checker import NotLinearizable, check_each
from tests.linearizability.history import Recorder, read_histories
from tests.linearizability.models import REFUSED, REFUSED_IN_DOUBT, lease_model
from tests.simulation.cluster.doubtful_store import DoubtfulRecorder
from tests.support.waiting import SECONDS

MAILBOXES = ("orders@p", "parcels@p")
RUNNERS = 4
STEPS = 25
ACQUISITION = "0192d1f0-7c1a-7000-8000-{:012x}"


class SharedDoubtfulRecorder(DoubtfulRecorder):
    """A store that several threads use, and that leaves them in doubt."""

    def __init__(self, seed: int) -> None:
        super().__init__(Random(seed))
        self.doubt = 0.25
        self.doubts = threading.local()
        self._turn = threading.RLock()

    def insert_events(self, *args: Any, **kwargs: Any) -> Any:
        with self._turn:
            try:
                return super().insert_events(*args, **kwargs)
            except OperationalError:
                self.doubts.of_call = True
                raise

    def select_events(self, *args: Any, **kwargs: Any) -> list[StoredEvent]:
        with self._turn:
            return super().select_events(*args, **kwargs)


class Runner:
    """A runner that asks one of several admins at random, and remembers what it was granted."""

    def __init__(
        self, number: int, seed: int, admins: list[Leases], doubts: threading.local, journal: Path
    ) -> None:
        self._name = f"runner-{number}"
        self._number = number
        self._random = Random(f"{seed} {number}")
        self._admins = admins
        self._doubts = doubts
        self._recorder = Recorder(journal / f"{self._name}.journal", self._name)
        self._attempts = 0
        self._epochs: dict[str, list[int]] = {mailbox: [] for mailbox in MAILBOXES}

    def run(self) -> None:
        with self._recorder:
            for _ in range(STEPS):
                self._step(self._random.choice(MAILBOXES))

    def _step(self, mailbox: str) -> None:
        epochs = self._epochs[mailbox]
        admin = self._random.choice(self._admins)
        if not epochs or self._random.random() < 0.3:
            self._attempts += self._random.random() < 0.7 or not self._attempts
            acquisition = ACQUISITION.format(self._number << 32 | self._attempts)
            command = AcquireLease(mailbox, self._name, "p", "127.0.0.1:7001", acquisition, 0, 60_000, 60_000)
            epoch = self._ask(
                mailbox, "acquire", [self._name, acquisition], lambda: admin.acquire(command).epoch
            )
            if isinstance(epoch, int):
                epochs.append(epoch)
            return
        epoch = self._random.choice(epochs[-2:])
        choice = self._random.random()
        if choice < 0.6:
            renew = RenewLease(mailbox, self._name, epoch)
            self._ask(mailbox, "renew", [self._name, epoch], lambda: admin.renew(renew).epoch)
        elif choice < 0.85:
            release = ReleaseLease(mailbox, self._name, epoch)
            self._ask(mailbox, "release", [self._name, epoch], lambda: bool(admin.release(release)))
        else:  # as an admin does, which no history shows
            lease = admin.lease(mailbox)
            if lease is not None:
                with suppress(Unavailable, LeaseLost):
                    admin.expire(ExpireLease(mailbox, lease.version))

    def _ask(self, mailbox: str, kind: str, input_: list[Any], ask: Callable[[], Any]) -> Any:
        call = self._recorder.call(mailbox, kind, input_)
        self._doubts.of_call = False
        try:
            answer = ask()
        except (LeaseHeld, LeaseLost):
            answer = REFUSED_IN_DOUBT if kind == "acquire" and self._doubts.of_call else REFUSED
        except Unavailable:  # nobody knows
            return None
        self._recorder.answer(call, answer)
        return answer


def record(folder: Path, seed: int) -> int:
    """Have runners race for leases, and check their histories; return the number of operations."""
    folder = folder / str(seed)
    folder.mkdir()
    recorder = SharedDoubtfulRecorder(seed)
    admins = [Leases(recorder, lambda: 0) for _ in range(2)]
    with ThreadPoolExecutor(RUNNERS) as threads:
        runners = [Runner(number, seed, admins, recorder.doubts, folder) for number in range(RUNNERS)]
        for running in [threads.submit(runner.run) for runner in runners]:
            running.result(SECONDS)
    return check_each(lease_model, read_histories(folder.glob("*.journal")))


def test_leases_of_a_doubtful_store_are_linearizable(tmp_path: Path) -> None:
    for seed in range(8):
        assert record(tmp_path, seed) > RUNNERS * STEPS // 2


def drop_the_comparison_of_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    lease_of = lease_rules._lease_of

    def mutated(command: Any, lease: Any) -> Any:
        return lease_of(type(command)(command.mailbox, command.runner, None), lease)

    monkeypatch.setattr(lease_rules, "_lease_of", mutated)


def keep_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    acquired = lease_rules._acquired

    def mutated(command: Any, lease: Any, now: int) -> Any:
        event = acquired(command, lease, now)
        values = {name: getattr(event, name) for name in event.__struct_fields__}
        return type(event)(**values | {"epoch": event.epoch if lease is None else lease.epoch})

    monkeypatch.setattr(lease_rules, "_acquired", mutated)


def believe_that_a_write_without_answer_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    save = Leases.save

    def mutated(self: Leases, *objects: Any, **options: Any) -> Any:
        try:
            return save(self, *objects, **options)
        except OperationalError:
            raise LeaseLost("mailbox", "the store did not answer") from None

    monkeypatch.setattr(Leases, "save", mutated)


def believe_that_a_write_without_answer_succeeded(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoError(Exception):
        """Is never raised."""

    def mutated(self: SharedDoubtfulRecorder, stored_events: Any, **options: Any) -> Any:
        try:
            return insert(self, stored_events, **options)
        except OperationalError:
            return [0] * len(stored_events)

    insert = SharedDoubtfulRecorder.insert_events
    monkeypatch.setattr(SharedDoubtfulRecorder, "insert_events", mutated)
    monkeypatch.setattr(leases_module, "OperationalError", NoError)


@pytest.mark.parametrize(
    "defect",
    [
        drop_the_comparison_of_epochs,
        keep_the_epoch,
        believe_that_a_write_without_answer_failed,
        believe_that_a_write_without_answer_succeeded,
    ],
    ids=lambda defect: defect.__name__,
)
def test_a_planted_defect_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, defect: Callable[[pytest.MonkeyPatch], None]
) -> None:
    defect(monkeypatch)
    with pytest.raises(NotLinearizable, match="the lease of"):
        sum(record(tmp_path, seed) for seed in range(40))
