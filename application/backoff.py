"""Backoff during outages of a database or broker."""

import msgspec


class OutageBackoff(msgspec.Struct, frozen=True):
    """Bounds of the pauses between attempts, for `postroom.domain.policy.backoff_ms`."""

    backoff_base_ms: int
    backoff_max_ms: int
