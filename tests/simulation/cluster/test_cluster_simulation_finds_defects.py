"""A simulation that can't go red proves nothing: each defect put into the real code must be found."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from postroom.domain.lease import lease as lease_module
from postroom.domain.lease.lease import AcquireLease, ExpireLease, Lease, ReleaseLease, RenewLease
from postroom.domain.lease.observation import HeldLease, LeaseObservations
from postroom.domain.lease.routing import Route, RoutingTable
from tests.simulation.cluster import admin as admin_module
from tests.simulation.cluster.admin import Admin
from tests.simulation.cluster.cluster import run
from tests.simulation.cluster.runner import Runner
from tests.simulation.cluster.storage import LeaseLog
from tests.simulation.cluster.world import MS, UnsafeStep

SEEDS = 2_000
"""Most defects are found within a hundred."""

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]
DEFECTS: dict[str, tuple[str, Defect]] = {}


def defect(broken: str) -> Callable[[Defect], Defect]:
    """Register a defect with the beginning of the promises that it breaks, separated by `|`."""

    def register(put_in: Defect) -> Defect:
        DEFECTS[put_in.__name__] = (broken, put_in)
        return put_in

    return register


@pytest.mark.parametrize("name", DEFECTS)
def test_the_simulation_finds(name: str, monkeypatch: Patch) -> None:
    broken, put_in = DEFECTS[name]
    put_in(monkeypatch)
    with pytest.raises(UnsafeStep, match=rf"Seed \d+: ({broken})"):
        run_all(SEEDS)


def run_all(seeds: int) -> None:
    for seed in range(seeds):
        run(seed)


# -- epochs ---


@defect("only the holder changes its lease|nobody takes a mailbox")
def a_release_by_a_stale_epoch_that_is_obeyed(patch: Patch) -> None:
    decide_before(patch, ReleaseLease, lambda command, lease: replace(command, epoch=None))


@defect("nobody takes a mailbox|the owner")
def a_renewal_by_a_stale_epoch_that_is_granted(patch: Patch) -> None:
    decide_before(patch, RenewLease, lambda command, lease: replace(command, epoch=None))


@defect("epochs grow")
def an_acquisition_that_keeps_the_epoch_of_the_last_owner(patch: Patch) -> None:
    acquired = lease_module._acquired

    def keep(command: AcquireLease, lease: Lease | None, now: int) -> Any:
        return replace(
            acquired(command, lease, now), epoch=max(1, command.log_epoch, lease.epoch if lease else 0)
        )

    patch.setattr(lease_module, "_acquired", keep)


@defect("the owner|every mailbox")
def an_epoch_that_is_not_above_that_of_the_log(patch: Patch) -> None:
    decide_before(patch, AcquireLease, lambda command, lease: replace(command, log_epoch=0))


@defect("no append of an older epoch")
def a_log_that_is_opened_by_an_older_epoch(patch: Patch) -> None:
    append = Runner._append

    def open_without_a_look(self: Runner, claim: Any, now: int) -> None:
        if claim.position is None:
            claim.position = len(claim.log.entries)
        append(self, claim, now)

    patch.setattr(Runner, "_append", open_without_a_look)


# -- acquisitions ---


@defect("an acquisition has one epoch")
def an_acquisition_that_is_not_idempotent(patch: Patch) -> None:
    acquire = lease_module._acquire

    def forget(command: AcquireLease, lease: Lease | None, now: int, *, is_expired: bool) -> Any:
        forgotten = None if lease is None else replace(lease, acquisition="")
        return acquire(command, forgotten, now, is_expired=is_expired)

    patch.setattr(lease_module, "_acquire", forget)


@defect("nobody takes a mailbox")
def a_repeated_acquisition_that_admins_do_not_see(patch: Patch) -> None:
    decide = lease_module.decide

    def silent(command: Any, lease: Lease | None, now: int, **seen: Any) -> Any:
        events = decide(command, lease, now, **seen)
        is_repeated = isinstance(command, AcquireLease) and isinstance(events[0], lease_module.LeaseRenewed)
        return [] if is_repeated else events

    patch.setattr(admin_module, "decide", silent)


@defect("only a lease that is held")
def an_acquisition_that_comes_late_and_brings_a_released_lease_back(patch: Patch) -> None:
    acquire = lease_module._acquire

    def bring_back(command: AcquireLease, lease: Lease | None, now: int, *, is_expired: bool) -> Any:
        held = replace(lease, is_held=True) if lease and lease.acquisition == command.acquisition else lease
        return acquire(command, held, now, is_expired=is_expired)

    patch.setattr(lease_module, "_acquire", bring_back)


# -- time ---


@defect("nobody takes a mailbox")
def a_deadline_that_is_counted_from_the_answer(patch: Patch) -> None:
    answered = Runner.answered
    patch.setattr(
        Runner,
        "answered",
        lambda self, mailbox, sent, lease, reason: answered(
            self, mailbox, sent._replace(at=self.uptime()), lease, reason
        ),
    )


@defect("nobody takes a mailbox")
def an_expiry_by_the_wall_clock(patch: Patch) -> None:
    patch.setattr(Admin, "uptime", Admin.wall)


@defect("nobody takes a mailbox")
def an_expiry_by_the_recorded_times(patch: Patch) -> None:
    def is_past(self: Admin, lease: Lease) -> bool:
        return lease.is_held and self.wall() > lease.renewed_at + (lease.ttl_ms + lease.grace_ms) * MS

    tick = Admin._tick

    def tick_by_the_wall(self: Admin) -> None:
        patch.setattr(LeaseObservations, "is_expired", lambda _, lease, now: is_past(self, lease))
        tick(self)

    patch.setattr(Admin, "_tick", tick_by_the_wall)


@defect("nobody takes a mailbox")
def an_expiry_without_the_grace_period(patch: Patch) -> None:
    is_expired = LeaseObservations.is_expired
    patch.setattr(
        LeaseObservations,
        "is_expired",
        lambda self, lease, now: is_expired(self, replace(lease, grace_ms=0), now),
    )


@defect("nobody takes a mailbox")
def an_expiry_that_is_counted_from_the_first_version(patch: Patch) -> None:
    observe = LeaseObservations.observe

    def keep(self: LeaseObservations, mailbox: str, version: int, now: int) -> None:
        first = self._observations._observations.get(mailbox)
        observe(self, mailbox, version, now if first is None else first.since)

    patch.setattr(LeaseObservations, "observe", keep)


@defect("every mailbox|the owner")
def an_expiry_that_starts_anew_at_every_look(patch: Patch) -> None:
    tick = Admin._tick

    def look(self: Admin) -> None:
        for lease in self.table.leases():
            self.table._lease_observations.forget(lease.mailbox)
            self.table._lease_observations.observe(lease.mailbox, lease.version, self.uptime())
        tick(self)

    patch.setattr(Admin, "_tick", look)


@defect("nobody takes a mailbox")
def an_expiry_of_another_version_than_was_seen(patch: Patch) -> None:
    decide_before(patch, ExpireLease, lambda command, lease: replace(command, version=lease.version))


@defect("nobody takes a mailbox")
def a_holder_whose_clock_stops_while_it_is_paused(patch: Patch) -> None:
    uptime, pause, go_on = Runner.uptime, Runner.pause, Runner.go_on
    paused: dict[Runner, int] = {}
    lost: dict[Runner, int] = {}

    def stop(self: Runner) -> None:
        paused[self] = uptime(self)
        pause(self)

    def resume(self: Runner) -> None:
        if self in paused:
            lost[self] = lost.get(self, 0) + uptime(self) - paused.pop(self)
        go_on(self)

    patch.setattr(Runner, "pause", stop)
    patch.setattr(Runner, "go_on", resume)
    patch.setattr(Runner, "uptime", lambda self: paused.get(self, uptime(self)) - lost.get(self, 0))


@defect("nobody takes a mailbox")
def a_holder_that_appends_in_the_grace_period(patch: Patch) -> None:
    may_append = HeldLease.may_append
    patch.setattr(
        HeldLease, "may_append", lambda self, now: may_append(self, max(self._last, now - 300 * MS))
    )


# -- the log of leases ---


@defect("epochs grow|only a lease that is held|nobody takes a mailbox|only the holder")
def a_log_that_takes_two_events_of_one_version(patch: Patch) -> None:
    append = LeaseLog._append

    def append_anyway(self: LeaseLog, mailbox: str, version: int, events: Any) -> str:
        lease = self.leases.get(mailbox)
        return append(self, mailbox, 0 if lease is None else lease.version, events)

    patch.setattr(LeaseLog, "_append", append_anyway)


@defect("a refused command changes nothing")
def a_write_in_doubt_that_is_believed_failed(patch: Patch) -> None:
    patch.setattr(admin_module, "MAX_TRIES", 0)
    patch.setattr(admin_module, "NOBODY_KNOWS", "it failed")
    patch.setattr(LeaseLog, "has", lambda self, event: False)


@defect("the owner|every mailbox|nobody takes a mailbox")
def a_write_in_doubt_that_is_believed_done(patch: Patch) -> None:
    patch.setattr(LeaseLog, "has", lambda self, event: True)


# -- routes ---


@defect("routes never go back")
def an_old_route_that_overwrites_a_newer_one(patch: Patch) -> None:
    def overwrite(self: RoutingTable, route: Route) -> bool:
        self._routes[route.mailbox] = route
        return True

    patch.setattr(RoutingTable, "update", overwrite)


@defect("routes never go back")
def a_removed_route_that_comes_back(patch: Patch) -> None:
    remove = RoutingTable.remove

    def forget(self: RoutingTable, mailbox: str, position: int) -> bool:
        is_removed = remove(self, mailbox, position)
        self._removals.clear()
        return is_removed

    patch.setattr(RoutingTable, "remove", forget)


@defect("routes never go back")
def a_table_of_an_admin_that_lags_behind(patch: Patch) -> None:
    def replace_all(self: RoutingTable, position: int, routes: Iterable[Route]) -> bool:
        self._routes = {route.mailbox: route for route in routes}
        self.position = position
        return True

    patch.setattr(RoutingTable, "replace_all", replace_all)


@defect("all admins and proxies have the route|routes never go back")
def a_push_that_is_lost_and_never_repaired(patch: Patch) -> None:
    update = RoutingTable.update

    def skip_ahead(self: RoutingTable, route: Route) -> bool:
        is_new = update(self, route)
        self.position = max(self.position, route.position)
        return is_new

    patch.setattr(RoutingTable, "update", skip_ahead)


def decide_before(patch: Patch, kind: type, change: Callable[[Any, Any], Any]) -> None:
    """Change a command, of which the lease is known, too, before the product decides on it."""
    decide = lease_module.decide

    def changed(command: Any, lease: Lease | None, now: int, **seen: Any) -> Any:
        if isinstance(command, kind):
            command = change(command, lease)
        return decide(command, lease, now, **seen)

    patch.setattr(admin_module, "decide", changed)
