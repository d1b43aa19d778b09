"""Settings of the control plane."""

import msgspec

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import DAY_MS

MIN_MEMBER_TTL_MS = 1_000
HEARTBEATS = 3
"""Registrations of a member per TTL, so that two may be lost."""


class ControlPlaneSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Intervals of an admin, in ms.

    Arguments:
        member_ttl_ms: after which a proxy or runner that did not register again counts as gone.
        poll_ms: between two reads of the log of leases, of which other admins are the writers.
        expiry_ms: between two searches for leases and proxies that expired.
        projection_ms: between two updates of RFC-049's tables.
        cleanup_ms: between two removals of events that no fold needs.
        call_ms: in which the lease store must answer.
    """

    member_ttl_ms: int = 15_000
    poll_ms: int = 50
    expiry_ms: int = 500
    projection_ms: int = 1_000
    cleanup_ms: int = 60_000
    call_ms: int = 5_000

    @property
    def member_interval_ms(self) -> int:
        """Return the interval at which proxies and runners register."""
        return self.member_ttl_ms // HEARTBEATS

    def validate(self) -> "ControlPlaneSettings":
        """Return the settings; raise InvalidRequest for one that is out of range."""
        check_int("member_ttl_ms", self.member_ttl_ms, MIN_MEMBER_TTL_MS, DAY_MS)
        for name in ("poll_ms", "expiry_ms", "projection_ms", "cleanup_ms", "call_ms"):
            check_int(name, getattr(self, name), 1, DAY_MS)
        if self.poll_ms > self.member_ttl_ms:
            raise InvalidRequest("poll_ms must be at most member_ttl_ms; lower it.")
        return self
