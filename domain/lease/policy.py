"""Lease policy of a namespace (RFC-049 Lease TTL Configuration)."""

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import DAY_MS, SECOND_MS

MAX_LEASE_MS = DAY_MS
MIN_GRACE_FRACTION = 20
"""The grace period is at least this fraction of the TTL: clock rates may differ by less than that."""
MIN_HEARTBEATS = 2
"""Heartbeats per TTL, so that one may fail."""


class LeasePolicy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Durations of the leases of a namespace, in ms.

    Arguments:
        ttl_ms: how long a lease lasts after its acquisition or last renewal; whole seconds, as on the wire.
        heartbeat_interval_ms: pause between renewals.
        grace_period_ms: how long after the TTL the holder may still renew, and nobody else may acquire.
    """

    ttl_ms: int = 300_000
    heartbeat_interval_ms: int = 60_000
    grace_period_ms: int = 60_000

    def validate(self) -> "LeasePolicy":
        """Return this policy, whose durations fit each other.

        Raises: InvalidRequest naming the duration that is out of bounds.
        """
        check_int("ttl_ms", self.ttl_ms, SECOND_MS, MAX_LEASE_MS)
        check_int("heartbeat_interval_ms", self.heartbeat_interval_ms, 1, MAX_LEASE_MS)
        check_int("grace_period_ms", self.grace_period_ms, 1, MAX_LEASE_MS)
        if self.ttl_ms % SECOND_MS:
            raise InvalidRequest(f"ttl_ms must be a multiple of {SECOND_MS}; it was {self.ttl_ms}.")
        if MIN_HEARTBEATS * self.heartbeat_interval_ms > self.ttl_ms:
            raise InvalidRequest(
                f"heartbeat_interval_ms must be at most half of ttl_ms, {self.ttl_ms // MIN_HEARTBEATS}, "
                f"so that one heartbeat may fail; it was {self.heartbeat_interval_ms}."
            )
        if MIN_GRACE_FRACTION * self.grace_period_ms < self.ttl_ms:
            minimum = -(-self.ttl_ms // MIN_GRACE_FRACTION)
            raise InvalidRequest(
                f"grace_period_ms must be at least a twentieth of ttl_ms, {minimum}, "
                f"to allow for clocks of different rates; it was {self.grace_period_ms}."
            )
        return self
