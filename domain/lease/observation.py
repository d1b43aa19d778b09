"""When an admin may let a lease expire, by its own uptime alone."""

import msgspec

from postroom.domain.lease.lease import Lease
from postroom.domain.message import MS


class _Observation(msgspec.Struct, frozen=True):
    version: int
    since: int


class LeaseObservations:
    """The newest version that an admin saw of each lease, and since when.

    The holder of a lease counts its TTL from before it sent the request that made a version, so it stops
    before an admin that saw that version for the TTL and the grace period lets the lease expire. No clock is
    compared with that of another process, and what happened before this process started does not count.
    """

    def __init__(self) -> None:
        self._observations: dict[str, _Observation] = {}

    def observe(self, mailbox: str, version: int, now: int) -> None:
        """Note that a lease has a version; only the first time that it is seen counts.

        Arguments:
            now: uptime in µs, taken after the version was read: the request for it was sent before that.
        """
        observation = self._observations.get(mailbox)
        if observation is None or version > observation.version:
            self._observations[mailbox] = _Observation(version, now)

    def is_expired(self, lease: Lease, now: int) -> bool:
        """Return whether `lease` is held and was the newest version for its TTL and grace period.

        Arguments:
            now: uptime in µs.
        """
        observation = self._observations.get(lease.mailbox)
        if observation is None or observation.version != lease.version or not lease.is_held:
            return False
        return now - observation.since >= (lease.ttl_ms + lease.grace_ms) * MS

    def remaining_ms(self, lease: Lease, now: int) -> int:
        """Return the ms until the end of the TTL, negative in the grace period; `now` is uptime in µs.

        A version that was not observed has its whole TTL left.
        """
        observation = self._observations.get(lease.mailbox)
        if observation is None or observation.version != lease.version:
            return lease.ttl_ms
        return (observation.since + lease.ttl_ms * MS - now) // MS

    def forget(self, mailbox: str) -> None:
        """Forget the lease of a mailbox, such as one that is not held."""
        self._observations.pop(mailbox, None)
