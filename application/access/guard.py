"""The current rights of one capability: its rights, its quotas, and the deliveries that it may settle.

Their settings are `AccessSettings`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from postroom.application.access.authority import Authority
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.arguments import check_int
from postroom.domain.capability.access import Access, check_operation, uncovered_topic
from postroom.domain.capability.rights import Quota, Right, check_quota
from postroom.domain.errors import Forbidden, Saturated, Unauthenticated
from postroom.domain.message import Receipt

DEFAULT_CACHE_TTL_MS = 30_000
MIN_CACHE_TTL_MS, MAX_CACHE_TTL_MS = 5_000, 120_000
ANY_PRINCIPAL = "*"


class AccessSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of access control.

    Arguments:
        cap_cache_ttl_ms: how long a verified token is not verified again, and how long a revocation may take
            to be effective in other processes; 5 to 120 s (svc-mailbox I-15, C-6).
        principal_quotas: quota of all capabilities of a principal together, by its name; `*` applies to each
            principal that is not named.
    """

    cap_cache_ttl_ms: int = DEFAULT_CACHE_TTL_MS
    principal_quotas: Mapping[str, Quota] = {}

    def validate(self) -> "AccessSettings":
        """Return the settings, or raise InvalidRequest."""
        check_int("cap_cache_ttl_ms", self.cap_cache_ttl_ms, MIN_CACHE_TTL_MS, MAX_CACHE_TTL_MS)
        for quota in self.principal_quotas.values():
            check_quota(quota)
        return self

    def quota_of(self, principal: str) -> Quota | None:
        """Return the quota of a principal; None if it has none."""
        return self.principal_quotas.get(principal) or self.principal_quotas.get(ANY_PRINCIPAL)


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
    """Usage in one window."""

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
        """Replace the quotas of principals in what `limits_of` returns from now on; usage is kept."""
        self._settings = settings

    def limits_of(self, access: Access) -> list[Limit]:
        """Return the limits of a capability: its own quotas and its principal's."""
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


MAX_TOPICS = 1_000
"""Size of the cache of topics that were compared with a capability."""


class Guard:
    """The decisions about the calls of one capability on one mailbox.

    Arguments:
        refused: is called for each refusal.
    """

    def __init__(
        self, access: Access, mailbox: str, authority: Authority, quotas: Quotas, refused: Callable[[], None]
    ) -> None:
        self.access = access
        self.mailbox = mailbox
        self._authority = authority
        self._quotas = quotas
        self._limits: list[Limit] = quotas.limits_of(access)
        self._refused = refused
        self._topics: dict[str, bool] = {}
        self.operations = access.operations if access.covers_mailbox(mailbox) else frozenset()
        self.covers_all_topics = access.covers_all_topics
        self.has_quotas = bool(self._limits)

    def check_validity(self) -> None:
        """Raise Unauthenticated unless the capability is valid now and not revoked."""
        error = self.invalidity()
        if error is not None:
            self._refused()
            raise error

    async def is_valid(self) -> bool:
        """Return whether the capability is valid now and not revoked."""
        await self._authority.ensure_fresh()
        return self.invalidity() is None

    def invalidity(self) -> Unauthenticated | None:
        """Return the error if the capability is not valid now; None if it is."""
        return self._authority.invalidity(self.access)

    def check_operation(self, operation: Right) -> None:
        """Raise Forbidden unless the capability covers an operation on the mailbox."""
        if operation in self.operations:
            return
        self._refused()
        check_operation(self.access, operation, self.mailbox)

    def permits(self, operation: Right) -> bool:
        """Return whether the capability covers an operation."""
        return operation in self.access.operations

    def covers(self, topic: str) -> bool:
        """Return whether the capability covers a topic."""
        if self.covers_all_topics:
            return True
        is_covered = self._topics.get(topic)
        if is_covered is None:
            is_covered = self.access.covers_topic(topic)
            if len(self._topics) < MAX_TOPICS:
                self._topics[topic] = is_covered
        return is_covered

    def check_topics(self, topics: Iterable[str]) -> None:
        """Raise Forbidden unless the capability covers all of these topics."""
        if not self.covers_all_topics and not all(map(self.covers, topics)):
            self._refused()
            raise uncovered_topic()

    def check_all_topics(self) -> None:
        """Raise Forbidden if the capability is limited to topics."""
        if not self.covers_all_topics:
            self._refused()
            raise Forbidden(
                "The capability is limited to topics, and this concerns all topics of the mailbox; get one "
                "that covers all, or name topics.",
                "topic",
            )

    async def check(self, *operations: Right) -> None:
        """Raise an error unless the capability is valid and covers these operations.

        Raises: Unauthenticated, Forbidden; Unavailable when revocations can't be read.
        """
        if self._authority.is_stale:  # nearly never, so the call is spared
            await self._authority.ensure_fresh()
        self.check_validity()
        for operation in operations:
            self.check_operation(operation)

    def charge(self, operations: int = 1, size: int = 0) -> None:
        """Count operations and bytes against the quotas; raise Saturated when one is used up."""
        if self._limits:
            self._quotas.charge(self._limits, operations, size)

    def count_bytes(self, sizes: Iterable[int]) -> None:
        """Count the bytes of payloads that were returned."""
        if self._limits:
            self._quotas.count_bytes(self._limits, sum(sizes))

    def at_most(self, messages: int) -> int:
        """Return how many of the requested messages a call may return."""
        limit = self.access.max_messages
        return messages if limit is None or type(messages) is not int else min(messages, limit)


CAPACITY = 65_536


class DeliveryRight(NamedTuple):
    """The right to settle a delivery: nonce of the capability, topic, and its end (µs since 1970 UTC)."""

    nonce: bytes
    topic: str
    due: int


class Deliveries:
    """The newest deliveries in flight.

    They give the topic of a receipt, and tell whose deliveries may be settled although the capability has
    expired or was revoked meanwhile (svc-mailbox I-15).

    Arguments:
        capacity: maximum number of them; the oldest are forgotten first.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._deliveries: dict[Receipt, DeliveryRight] = {}
        self._counts: dict[bytes, int] = {}

    def add(self, nonce: bytes, messages: Iterable[ReceivedMessage], now: int) -> None:
        """Add deliveries at `now`, µs since 1970 UTC."""
        for message in messages:
            self.settle(message.receipt)
            self._deliveries[message.receipt] = DeliveryRight(nonce, message.topic, message.visible_at_us)
            self._counts[nonce] = self._counts.get(nonce, 0) + 1
        while self._deliveries:
            oldest = next(iter(self._deliveries))
            if len(self._deliveries) <= self._capacity and self._deliveries[oldest].due > now:
                return
            self.settle(oldest)

    def get(self, receipt: Receipt) -> DeliveryRight | None:
        """Return a delivery; None if it is unknown or settled."""
        return self._deliveries.get(receipt)

    def has_any(self, nonce: bytes) -> bool:
        """Return whether a capability may have deliveries in flight."""
        return nonce in self._counts

    def settle(self, receipt: Receipt) -> None:
        """Forget a delivery."""
        delivery = self._deliveries.pop(receipt, None)
        if delivery is not None:
            self._counts[delivery.nonce] -= 1
            if not self._counts[delivery.nonce]:
                del self._counts[delivery.nonce]

    def extend(self, receipt: Receipt, due: int) -> None:
        """Note that a delivery lasts until `due`, µs since 1970 UTC."""
        delivery = self._deliveries.get(receipt)
        if delivery is not None:
            self._deliveries[receipt] = delivery._replace(due=due)
