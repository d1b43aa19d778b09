"""When an admin may let a lease expire, by its own uptime alone."""

import msgspec

from postroom.domain.lease.lease import Lease
from postroom.domain.message import MS


class _Observation(msgspec.Struct, frozen=True):
    version: int
    since: int


class Observations:
    """The newest version that an admin saw of each aggregate, by name, and since when.

    All times are uptime in µs, taken after the version was read: what made the version was before that.
    """

    def __init__(self) -> None:
        self._observations: dict[str, _Observation] = {}

    def observe(self, name: str, version: int, now: int) -> None:
        """Note that an aggregate has a version; only the first time that it is seen counts."""
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
    renewal, and adds the grace period. So the holder stops first, and no process compares its clock with that
    of another. An admin that starts counts from its start.
    """

    def __init__(self) -> None:
        self._observations = Observations()

    def observe(self, mailbox: str, version: int, now: int) -> None:
        """Note that a lease has a version; only the first time that it is seen counts.

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
