"""What a cluster promises at every step, whatever goes wrong."""

from collections.abc import Sequence
from typing import Protocol

from postroom.domain.lease.lease import (
    AcquireLease,
    Lease,
    LeaseAcquired,
    LeaseChange,
    LeaseCommand,
    LeaseExpired,
    LeaseReleased,
    LeaseRenewed,
    ReleaseLease,
)
from tests.simulation.cluster.world import World


class Owner(Protocol):
    """A process that may own mailboxes."""

    name: str

    def may_append(self, mailbox: str) -> bool: ...


class Promises:
    """Check every event of a lease when it is written.

    Arguments:
        is_bounded: whether the rates of all clocks differ by less than the grace period allows for. If not,
            two runners may think that they own a mailbox, and only epochs keep its log sound.
    """

    def __init__(self, world: World, runners: Sequence[Owner], *, is_bounded: bool) -> None:
        self._require = world.require
        self._runners = runners
        self._is_bounded = is_bounded

    def check(self, before: Lease | None, event: LeaseChange) -> None:
        """Require that an event may follow a lease.

        Raises: UnsafeStep when it may not.
        """
        is_held = before is not None and before.is_held
        if isinstance(event, LeaseAcquired):
            self._check_acquired(before, event)
        else:
            self._require(is_held, "only a lease that is held changes", before, event)
        if isinstance(event, LeaseRenewed | LeaseReleased):
            assert before is not None
            is_same = (event.runner, event.epoch) == (before.runner, before.epoch)
            self._require(is_same, "only the holder changes its lease", before, event)
        if self._is_bounded and not isinstance(event, LeaseRenewed):
            self._check_owners(event)

    def check_refused(self, command: LeaseCommand, lease: Lease | None) -> None:
        """Require that an acquisition or release that was refused did not happen, as the log tells now."""
        if not isinstance(command, AcquireLease | ReleaseLease) or lease is None:
            return
        if isinstance(command, AcquireLease):
            is_done = lease.is_held and lease.acquisition == command.acquisition
        else:
            is_done = not lease.is_held and lease.epoch == command.epoch
        is_done = is_done and lease.runner == command.runner
        self._require(not is_done, "a refused command changes nothing", command, lease)

    def _check_acquired(self, before: Lease | None, event: LeaseAcquired) -> None:
        if before is not None:
            self._require(event.epoch > before.epoch, "epochs grow", before, event)
            is_new = (event.runner, event.acquisition) != (before.runner, before.acquisition)
            self._require(is_new, "an acquisition has one epoch", before, event)

    def _check_owners(self, event: LeaseAcquired | LeaseExpired | LeaseReleased) -> None:
        """Nobody takes a mailbox from a runner that may append; that runner itself may acquire it anew."""
        for runner in self._runners:
            if runner.may_append(event.mailbox):
                is_own = isinstance(event, LeaseAcquired) and runner.name == event.runner
                self._require(is_own, "nobody takes a mailbox from its owner", event, runner.name)
