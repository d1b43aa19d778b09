"""Lease policies of namespaces (RFC-049 Lease TTL Configuration)."""

from collections.abc import Mapping

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.lease.policy import MAX_LEASE_MS, LeasePolicy
from postroom.domain.policy import SECOND_MS


class LeasePolicies(msgspec.Struct, frozen=True):
    """Lease policies by namespace.

    Arguments:
        default: of the namespaces that have none of their own.
    """

    default: LeasePolicy = LeasePolicy()
    namespaces: Mapping[str, LeasePolicy] = {}

    def get(self, mailbox: str, ttl_ms: int | None = None) -> LeasePolicy:
        """Return the policy of a mailbox.

        Arguments:
            ttl_ms: TTL that a runner asks for; it may shorten that of the namespace, not lengthen it. None
                asks for that of the namespace.

        Raises: InvalidRequest for a TTL below one second.
        """
        policy = self.namespaces.get(mailbox.partition("@")[0], self.default)
        if ttl_ms is None or check_int("ttl_ms", ttl_ms, SECOND_MS) >= policy.ttl_ms:
            return policy
        return scale_policy(policy, ttl_ms - ttl_ms % SECOND_MS)


def scale_policy(policy: LeasePolicy, ttl_ms: int) -> LeasePolicy:
    """Return a policy with another TTL, whose other durations have the same share of it."""

    def scale(duration_ms: int) -> int:
        return min(MAX_LEASE_MS, max(1, -(-duration_ms * ttl_ms // policy.ttl_ms)))

    heartbeat_interval_ms = min(scale(policy.heartbeat_interval_ms), ttl_ms // 2)
    return LeasePolicy(
        ttl_ms=ttl_ms,
        heartbeat_interval_ms=heartbeat_interval_ms,
        grace_period_ms=scale(policy.grace_period_ms),
    )
