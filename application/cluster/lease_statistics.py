"""Statistics of mailboxes that runners send with their heartbeats."""

from typing import get_args

from postroom.application.ports.control_plane import Health, Heartbeat, LeaseState, LeaseSummary
from postroom.domain.arguments import check_choice, check_int
from postroom.domain.lease.lease import Lease


class LeaseStatistics:
    """The last heartbeat of each mailbox that this admin received; another admin has others."""

    def __init__(self) -> None:
        self._heartbeats: dict[str, Heartbeat] = {}

    @staticmethod
    def check(heartbeat: Heartbeat) -> None:
        """Raise InvalidRequest for statistics that are malformed."""
        for name in ("events_stored", "queries_served", "storage_size_bytes"):
            check_int(name, getattr(heartbeat, name))
        check_choice("status", heartbeat.status, get_args(Health))

    def add(self, heartbeat: Heartbeat) -> None:
        """Keep the statistics of a lease that was renewed."""
        self._heartbeats[heartbeat.mailbox] = heartbeat

    def summarize(self, lease: Lease, status: LeaseState, remaining_ms: int) -> LeaseSummary:
        """Return a lease with the statistics of its runner."""
        heartbeat = self._heartbeats.get(lease.mailbox)
        if heartbeat is None or heartbeat.runner != lease.runner:
            heartbeat = Heartbeat(mailbox=lease.mailbox, runner="", proxy="")
        return LeaseSummary(
            mailbox=lease.mailbox,
            runner=lease.runner,
            proxy=lease.proxy,
            address=lease.address,
            partition=lease.partition,
            epoch=lease.epoch,
            status=status,
            ttl_ms=lease.ttl_ms,
            grace_ms=lease.grace_ms,
            remaining_ms=remaining_ms,
            acquired_at=lease.acquired_at,
            renewed_at=lease.renewed_at,
            events_stored=heartbeat.events_stored,
            queries_served=heartbeat.queries_served,
            storage_size_bytes=heartbeat.storage_size_bytes,
            health=heartbeat.status if heartbeat.runner else "",
        )
