"""The lease of a mailbox as its runner sees it (RFC-049 Pattern Runner Lease Protocol)."""

from postroom.domain.lease.policy import LeasePolicy
from postroom.domain.message import MS

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
        """Begin without a lease; of the policy only the interval of heartbeats is used."""
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
        """Note that an admin granted the lease; a grant of an older epoch, delayed on its way, is ignored."""
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
        """Return whether no other runner can have acquired the lease; a clock that went back says nothing."""
        return not self.is_lost and self._last <= now < self.deadline

    def next_heartbeat(self, now: int) -> int:
        """Return when the next heartbeat is to be sent, at the earliest `now`."""
        return max(now, self._next)

    def _extend(self, sent_at: int) -> None:
        self._failures = 0
        self._last = max(self._last, sent_at)
        self.deadline = max(self.deadline, sent_at + self._ttl)
        self._next = self._last + self._interval
