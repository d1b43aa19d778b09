"""How soon a mailbox has its next owner after the last one died, and how often others ask until then."""

import asyncio

import pytest

from postroom.application.cluster.control_plane import ControlPlane
from postroom.application.metrics import Histogram
from tests.simulation.cluster.processes import RunnerProcess
from tests.simulation.cluster.test_processes_simulation import GRACE_MS, MAILBOXES, TTL_MS, Processes

MARGIN_SECONDS = 0.1
"""After the expiry of a lease: chance, the network, and clocks of different rates."""
QUIET_SECONDS = 20


class OneDeath(Processes):
    """A cluster without faults, until the owner of a mailbox dies.

    Attributes:
        take_over_seconds: until another runner had its lease.
        refusals: of acquisitions before that.
    """

    take_over_seconds = 0.0
    refusals = 0

    async def _run(self) -> None:
        await self._start_all()
        await asyncio.sleep(QUIET_SECONDS)
        self.refusals = sum([await self._count_refusals(each.control_plane) for each in self.admins])
        owner = self._owner()
        await owner.crash()
        died = self.loop.time()
        async with asyncio.timeout(10):
            while self._owner() is owner:
                await asyncio.sleep(0.001)
        self.take_over_seconds = self.loop.time() - died
        for runner in self.runners:
            await runner.crash()
        for admin in self.admins:
            await admin.crash()
        await asyncio.sleep(1)

    def _owner(self) -> RunnerProcess:
        lease = self.recorder.leases[MAILBOXES[0]]
        return next(each for each in self.runners if each.name == lease.runner)

    @staticmethod
    async def _count_refusals(control_plane: ControlPlane | None) -> int:
        assert control_plane is not None
        metrics = await control_plane.monitor.collect()
        (refusals,) = (each for each in metrics if each.name == "postroom_lease_refusals")
        return sum(int(value) for _, value in refusals.samples if not isinstance(value, Histogram))


@pytest.mark.parametrize("seed", range(5))
def test_a_mailbox_has_its_next_owner_as_soon_as_the_lease_of_a_dead_one_expires(seed: int) -> None:
    processes = OneDeath(seed)
    processes.run()
    assert processes.take_over_seconds <= (TTL_MS + GRACE_MS) / 1_000 + MARGIN_SECONDS
    assert processes.refusals <= 1.2 * QUIET_SECONDS * len(MAILBOXES)
