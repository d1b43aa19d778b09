"""Observations of leases by holders and admins, by their own uptime alone."""

import msgspec

from postroom.domain.lease.lease import Lease, LeasePolicy
from postroom.domain.message import MS


class _Observation(msgspec.Struct, frozen=True):
    version: int
    since: int


class Observations:
    """The newest version that an admin saw of each aggregate, by name, and since when.

    All times are uptime in µs, taken after the version was read, so the version is at least as old.
    """

    def __init__(self) -> None:
        self._observations: dict[str, _Observation] = {}

    def observe(self, name: str, version: int, now: int) -> None:
        """Note that an aggregate has a version; later observations of the same version change nothing."""
        observation = self._observations.get(name)
        if observation is None or version > observation.version:
            self._observations[name] = _Observation(version, now)

    def since(self, name: str, version: int) -> int | None:
        """Return when a version was first seen; None if it was not seen, or is not the newest."""
        observation = self._observations.get(name)
        return None if observation is None or observation.version != version else observation.since

    def is_unchanged(self, name: str, version: int, duration_ms: int, now: int) -> bool:
        """Return whether a version was the newest one for `duration_ms`."""
        since = self.since(name, version)
        return since is not None and now - since >= duration_ms * MS

    def forget(self, name: str) -> None:
        """Forget an aggregate."""
        self._observations.pop(name, None)


class LeaseObservations:
    """The newest version that an admin saw of each lease, and since when.

    A holder counts the TTL of its lease from before it sent the renewal. An admin counts from when it saw the
    renewal, and adds the grace period. So the holder stops first, and no process compares its clock with
    another's. An admin that starts counts from its start.
    """

    def __init__(self) -> None:
        self._observations = Observations()

    def observe(self, mailbox: str, version: int, now: int) -> None:
        """Note that a lease has a version; later observations of the same version change nothing.

        Arguments:
            now: uptime in µs, taken after the version was read.
        """
        self._observations.observe(mailbox, version, now)

    def is_expired(self, lease: Lease, now: int) -> bool:
        """Return whether `lease` is held and was the newest version for its TTL and grace period.

        Arguments:
            now: uptime in µs.
        """
        duration_ms = lease.ttl_ms + lease.grace_ms
        return lease.is_held and self._observations.is_unchanged(
            lease.mailbox, lease.version, duration_ms, now
        )

    def remaining_ms(self, lease: Lease, now: int) -> int:
        """Return the ms until the end of the TTL, negative in the grace period.

        A version that was not observed has its whole TTL left.

        Arguments:
            now: uptime in µs.
        """
        since = self._observations.since(lease.mailbox, lease.version)
        return lease.ttl_ms if since is None else (since + lease.ttl_ms * MS - now) // MS

    def forget(self, mailbox: str) -> None:
        """Forget the lease of a mailbox, such as one that is not held."""
        self._observations.forget(mailbox)


RETRY_BASE_MS = 100


class HeldLease:
    """State machine of a runner's lease: until when it may append, and when it sends the next heartbeat.

    All times are uptime in µs (CLOCK_BOOTTIME), which only this process reads. The time of a request is taken
    before it is sent, so that the lease begins no later than an admin records it.

    Attributes:
        epoch: of the lease; 0 before it was granted.
        deadline: end of its TTL.
        reason: why it is lost; empty while it is not.
    """

    def __init__(self, policy: LeasePolicy) -> None:
        """Begin without a lease; only the policy's interval of heartbeats is used."""
        self._interval = policy.heartbeat_interval_ms * MS
        self._ttl = 0
        self._failures = 0
        self._last = 0
        self._next = 0
        self.epoch = 0
        self.deadline = 0
        self.reason = ""

    @property
    def is_lost(self) -> bool:
        """Return whether an admin refused to renew the lease; only another acquisition ends that."""
        return bool(self.reason)

    def granted(self, sent_at: int, ttl_ms: int, epoch: int) -> None:
        """Note that an admin granted the lease; a delayed grant of an older epoch is ignored."""
        if epoch < self.epoch or (epoch == self.epoch and self.is_lost):
            return
        if epoch > self.epoch:
            self.deadline = 0
        self._ttl = ttl_ms * MS
        self.epoch = epoch
        self.reason = ""
        self._extend(sent_at)

    def renewed(self, sent_at: int, epoch: int | None = None) -> None:
        """Note that an admin renewed the lease.

        Arguments:
            epoch: epoch of the heartbeat, which is ignored unless it is the current one or None.
        """
        if self.epoch and not self.is_lost and epoch in (None, self.epoch):
            self._extend(sent_at)

    def refused(self, reason: str, epoch: int | None = None) -> None:
        """Note that an admin refused a renewal: the runner must stop serving the mailbox.

        Arguments:
            epoch: epoch of the heartbeat, which is ignored unless it is the current one or None.
        """
        if epoch in (None, self.epoch):
            self.reason = reason or "no reason given"

    def failed(self, now: int, jitter: float) -> None:
        """Note that a heartbeat got no answer: the next one follows after a backoff.

        Arguments:
            jitter: uniform random number in [0, 1).
        """
        self._failures += 1
        ceiling = min(self._interval, RETRY_BASE_MS * MS << min(self._failures, 40))
        self._next = now + int((1 + jitter) / 2 * ceiling)

    def may_append(self, now: int) -> bool:
        """Return whether no other runner can have acquired the lease; False if the clock went back."""
        return not self.is_lost and self._last <= now < self.deadline

    def next_heartbeat(self, now: int) -> int:
        """Return when to send the next heartbeat, at the earliest `now`."""
        return max(now, self._next)

    def _extend(self, sent_at: int) -> None:
        self._failures = 0
        self._last = max(self._last, sent_at)
        self.deadline = max(self.deadline, sent_at + self._ttl)
        self._next = self._last + self._interval
