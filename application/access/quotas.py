"""Quotas: how many operations and bytes a capability or a principal may use in a window of time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from postroom.application.access.settings import AccessSettings
from postroom.domain.capability.access import Access
from postroom.domain.capability.rights import Quota
from postroom.domain.errors import Saturated

US_PER_MS = 1_000
CLEAN_UP_AT = 10_000
"""Number of counters from which those whose windows have ended are removed."""


class Limit(NamedTuple):
    """A quota and the counter that it is compared with.

    Capabilities attenuated from one share its counters, so attenuating gives no fresh quota.
    """

    counter: tuple[object, int]
    quota: Quota


class _Usage:
    """What was used in one window."""

    __slots__ = ("bytes", "number", "operations")

    def __init__(self, number: int) -> None:
        self.number = number
        self.operations = 0
        self.bytes = 0


class Quotas:
    """Usage of capabilities and principals, in memory; a restart begins new windows.

    Arguments:
        uptime: a monotonic clock in µs.
    """

    def __init__(self, settings: AccessSettings, uptime: Callable[[], int]) -> None:
        self._settings = settings
        self._uptime = uptime
        self._usages: dict[tuple[object, int], _Usage] = {}

    def reconfigure(self, settings: AccessSettings) -> None:
        """Apply other quotas of principals to what `limits_of` returns from now on; usage is kept."""
        self._settings = settings

    def limits_of(self, access: Access) -> list[Limit]:
        """Return the limits of a capability: its own quotas and that of its principal."""
        limits = [Limit((access.nonce, quota.window_ms), quota) for quota in access.quotas]
        quota = self._settings.quota_of(access.principal)
        if quota is not None:
            limits.append(Limit((access.principal, quota.window_ms), quota))
        return limits

    def charge(self, limits: Sequence[Limit], operations: int, size: int) -> None:
        """Count operations and bytes, all or none.

        Raises: Saturated, until the window ends, when a limit would be exceeded.
        """
        now = self._uptime() // US_PER_MS
        usages = [self._usage(limit, now) for limit in limits]
        for (_, quota), usage in zip(limits, usages, strict=True):
            for name, used, limit in (
                ("operations", usage.operations + operations, quota.operations),
                # Bytes of messages received are counted afterwards, so what is used may exceed the limit.
                ("bytes", usage.bytes + max(size, 1), quota.bytes),
            ):
                if limit is not None and used > limit:
                    raise Saturated(
                        f"The quota of {limit} {name} in {quota.window_ms} ms is used up; retry when the "
                        "window ends, or ask for a larger quota.",
                        max(quota.window_ms - now % quota.window_ms, 1),
                    )
        for usage in {id(usage): usage for usage in usages}.values():
            usage.operations += operations
            usage.bytes += size

    def count_bytes(self, limits: Sequence[Limit], size: int) -> None:
        """Count bytes that were delivered."""
        now = self._uptime() // US_PER_MS
        for usage in {id(usage): usage for usage in (self._usage(limit, now) for limit in limits)}.values():
            usage.bytes += size

    def _usage(self, limit: Limit, now: int) -> _Usage:
        counter = limit.counter
        number = now // limit.quota.window_ms
        usage = self._usages.get(counter)
        if usage is None or usage.number != number:
            if len(self._usages) >= CLEAN_UP_AT:
                self._clean_up(now)
            usage = self._usages[counter] = _Usage(number)
        return usage

    def _clean_up(self, now: int) -> None:
        self._usages = {
            counter: usage for counter, usage in self._usages.items() if usage.number == now // counter[1]
        }
