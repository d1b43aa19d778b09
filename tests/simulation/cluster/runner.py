"""A runner: it acquires mailboxes, renews their leases, appends while it may, and stops in time."""

from typing import NamedTuple
from uuid import UUID

from postroom.domain.lease.lease import AcquireLease, Lease, LeasePolicy, ReleaseLease, RenewLease
from postroom.domain.lease.observation import HeldLease
from tests.simulation.cluster.admin import Admin
from tests.simulation.cluster.storage import Entry, MailboxLog
from tests.simulation.cluster.world import MS, Process, World

RETRY = 200 * MS


class Sent(NamedTuple):
    """A request as its sender remembers it; `at` is the sender's uptime before it was sent."""

    life: int
    at: int
    epoch: int
    acquisition: str


class Claim:
    """A mailbox that a runner wants or has.

    Attributes:
        acquisition: UUID of the attempt under way; empty while there is none.
        held: its lease; a lost one stays until the next is granted.
        position: the end of the log as far as it knows; None while it has not opened the log.
        pause_until: uptime until which it doesn't ask for the lease.
    """

    def __init__(self, log: MailboxLog, policy: LeasePolicy) -> None:
        self.log = log
        self.mailbox = log.mailbox
        self.acquisition = ""
        self.held = HeldLease(policy)
        self.position: int | None = None
        self.is_appending = False
        self.pause_until = 0


class Runner(Process):
    """A process that owns mailboxes by lease."""

    def __init__(
        self,
        world: World,
        name: str,
        rate: int,
        admins: list[Admin],
        logs: list[MailboxLog],
        policy: LeasePolicy,
    ) -> None:
        super().__init__(world, name, rate)
        self.claims: dict[str, Claim] = {}
        self._admins = admins
        self._logs = logs
        self._policy = policy

    def started(self) -> None:
        """Want the mailboxes that it is configured with; a runner remembers nothing of its former life."""
        self.claims = {log.mailbox: Claim(log, self._policy) for log in self._logs}
        for claim in self.claims.values():
            self.after(self.world.random.randrange(RETRY), self._next, claim)

    def may_append(self, mailbox: str) -> bool:
        """Return whether it would append to a mailbox now."""
        claim = self.claims.get(mailbox)
        return claim is not None and self.is_alive and claim.held.may_append(self.uptime())

    def release(self, mailbox: str) -> None:
        """Release a mailbox, and want it again after a while."""
        claim = self.claims.get(mailbox)
        if claim is None or not self.is_alive or not claim.held.may_append(self.uptime()):
            return
        command = ReleaseLease(mailbox, self.name, claim.held.epoch)
        claim.held.refused("released")
        claim.acquisition = ""
        claim.position = None
        claim.pause_until = self.uptime() + self.world.random.randrange(3 * RETRY)
        for _ in range(2):  # repeated, as nobody waits for the answer
            self._ask(command, Sent(self.life, self.uptime(), command.epoch or 0, ""))

    # -- the lease ---

    def _next(self, claim: Claim) -> None:
        now = self.uptime()
        if claim.held.is_lost or not claim.held.epoch or claim.acquisition:
            if now >= claim.pause_until:
                self._acquire(claim, now)
            wait = RETRY // 2 + self.world.random.randrange(RETRY)
        else:
            if claim.held.next_heartbeat(now) <= now:
                claim.held.failed(now, self.world.random.random())  # until it is answered
                command = RenewLease(claim.mailbox, self.name, claim.held.epoch)
                self._ask(command, Sent(self.life, now, claim.held.epoch, ""))
            self._append(claim, now)
            wait = min(RETRY, claim.held.next_heartbeat(now) - now)
        self.after(max(wait, MS), self._next, claim)

    def _acquire(self, claim: Claim, now: int) -> None:
        if not claim.acquisition:
            claim.acquisition = str(UUID(int=self.world.random.getrandbits(128), version=4))
        command = AcquireLease(
            claim.mailbox,
            self.name,
            claim.mailbox.partition("@")[2],
            f"{self.name}:8982",
            claim.acquisition,
            claim.log.epoch,
            self._policy.ttl_ms,
            self._policy.grace_period_ms,
        )
        self._ask(command, Sent(self.life, now, 0, claim.acquisition))

    def _ask(self, command: AcquireLease | RenewLease | ReleaseLease, sent: Sent) -> None:
        admin = self.world.random.choice(self._admins)
        self.world.network.send(self.name, admin, admin.handle, self, command, sent)

    def answered(self, mailbox: str, sent: Sent, lease: Lease | None, reason: str) -> None:
        """Note what an admin answered; an empty reason without a lease tells that the admin doesn't know."""
        if sent.life != self.life:
            return
        claim = self.claims[mailbox]
        held = claim.held
        if sent.epoch:
            if lease is not None:
                held.renewed(sent.at, sent.epoch)
            elif reason and sent.epoch == held.epoch:
                held.refused(reason, sent.epoch)
                claim.position = None
        elif (
            lease is not None
            and sent.acquisition == claim.acquisition
            and sent.acquisition == lease.acquisition
        ):
            if lease.epoch != held.epoch:
                claim.position = None
            held.granted(sent.at, lease.ttl_ms, lease.epoch)
            claim.acquisition = ""
            self.world.note(self.name, "has the lease of", mailbox, "epoch", lease.epoch)
        elif reason:
            claim.acquisition = ""

    # -- the mailbox's log ---

    def _append(self, claim: Claim, now: int) -> None:
        """Append a record, unless one is under way; the first one of an epoch takes the log over."""
        if claim.is_appending or not claim.held.may_append(now):
            return
        log = claim.log
        if claim.position is None:
            if log.epoch >= claim.held.epoch:
                claim.held.refused("the log has a newer owner")
                return
            claim.position = len(log.entries)
        claim.is_appending = True
        entry = Entry(claim.held.epoch, (self.name, self.life))
        log.append(claim.position + 1, entry, self.bound(lambda is_next: self._appended(claim, is_next)))

    def _appended(self, claim: Claim, is_next: bool) -> None:
        claim.is_appending = False
        if claim.position is not None:
            claim.position = claim.position + 1 if is_next else None
