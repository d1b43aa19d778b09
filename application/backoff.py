"""Backoff during outages of a database or broker."""

import msgspec


class OutageBackoff(msgspec.Struct, frozen=True):
    """Bounds of the pauses between attempts, for `postroom.domain.policy.backoff_ms`."""

    backoff_base_ms: int
    backoff_max_ms: int

    def within(self, max_ms: int) -> "OutageBackoff":
        """Return these pauses with none above a maximum, in ms."""
        return OutageBackoff(min(self.backoff_base_ms, max_ms), min(self.backoff_max_ms, max_ms))
