"""A run of the simulation: a cluster, what goes wrong in it, and what it must keep all the time."""

from collections.abc import Callable
from typing import Any

from postroom.domain.lease.lease import Lease, LeaseEvent, LeasePolicy
from tests.simulation.cluster.admin import Admin
from tests.simulation.cluster.promises import Promises
from tests.simulation.cluster.proxy import INTERVAL, Proxy
from tests.simulation.cluster.runner import Runner
from tests.simulation.cluster.storage import Entry, LeaseLog, MailboxLog
from tests.simulation.cluster.world import MS, Process, UnsafeStep, World

EXACT = 1_000_000
"""Rate of a clock that is neither fast nor slow, in millionths."""


class Cluster:
    """Admins, proxies and runners, and the faults that a seed chooses.

    Attributes:
        is_bounded: whether the rates of all clocks differ by less than the grace period allows for. If not,
            two runners may think that they own a mailbox, and only epochs keep its log sound.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = World(seed)
        random = self.random = self.world.random
        self.policy = LeasePolicy(
            ttl_ms=1_000, heartbeat_interval_ms=400, grace_period_ms=random.choice((50, 100, 300))
        ).validate()
        self.is_bounded = random.random() < 0.8
        self.log = LeaseLog(self.world)
        history = [[], [Entry(50, ("a process without a lease", 1))]]
        self.mailbox_logs = [
            MailboxLog(self.world, f"orders@p{n}", list(random.choice(history)))
            for n in range(random.choice((1, 1, 2)))
        ]
        self.admins = [Admin(self.world, f"admin{n}", self._rate(), self.log) for n in range(2)]
        self.proxies = [
            Proxy(self.world, f"p{n}", self._rate(), self.admins) for n in range(random.choice((1, 2)))
        ]
        self.runners = [
            Runner(self.world, f"runner{n}", self._rate(), self.admins, self.mailbox_logs, self.policy)
            for n in range(random.choice((2, 2, 3)))
        ]
        self.log.promises = Promises(self.world, self.runners, is_bounded=self.is_bounded)
        self.processes: list[Process] = [*self.admins, *self.proxies, *self.runners]

    def run(self) -> None:
        """Let things go wrong for a while, then heal everything and wait until all mailboxes have an owner.

        Raises: UnsafeStep when a promise is broken.
        """
        world = self.world
        for process in self.processes:
            world.at(self.random.randrange(100 * MS), process.start)
        self._break_network()
        duration = self.random.randrange(1_500, 3_500) * MS
        for _ in range(self.random.randrange(2, 9)):
            world.at(self.random.randrange(duration), self._fault())
        world.run(duration)
        self._heal()
        policy = self.policy
        healed = (policy.ttl_ms + policy.grace_period_ms + policy.heartbeat_interval_ms) * MS
        world.run(duration + healed + 2 * INTERVAL)
        self._require_owners()

    # -- faults ---

    def _rate(self) -> int:
        if not self.is_bounded:
            return self.random.choice((EXACT // 3, EXACT, 3 * EXACT))
        most = EXACT + EXACT * self.policy.grace_period_ms // self.policy.ttl_ms - 1_000
        return self.random.choice((EXACT, most, self.random.randrange(EXACT, most)))

    def _break_network(self) -> None:
        random, network = self.random, self.world.network
        network.loss = random.choice((0.0, 0.02, 0.2))
        network.repeats = random.choice((0.0, 0.1))
        network.delay = random.choice((5, 50, 200)) * MS
        network.straggler = random.choice((5, 400, 1_500)) * MS
        self.log.doubt = random.choice((0.0, 0.1, 0.3))
        self.log.latency = random.choice((5, 5, 60)) * MS

    def _fault(self) -> Callable[[], None]:
        random = self.random
        victim = random.choice(self.processes)
        lasts = random.randrange(50, 2_200) * MS
        runner = random.choice(self.runners)
        mailbox = random.choice(self.mailbox_logs).mailbox

        def crash() -> None:
            victim.crash()
            self.world.at(lasts // 2, victim.start)

        def pause() -> None:
            victim.pause()
            self.world.at(lasts, victim.go_on)

        def cut() -> None:
            self.world.note(victim.name, "is cut off")
            self.world.network.cut.add(victim.name)
            self.world.at(lasts, self.world.network.cut.discard, victim.name)

        def step_clock() -> None:
            victim.skew = random.choice((-1, 1)) * random.randrange(10_000_000 * MS)
            self.world.note(victim.name, "has its wall clock set")

        return random.choice((crash, pause, pause, cut, step_clock, lambda: runner.release(mailbox)))

    def _heal(self) -> None:
        self.world.note("everything", "is healed")
        self.world.network.heal()
        self.log.doubt = 0.0
        self.log.latency = 5 * MS
        for mailbox_log in self.mailbox_logs:
            mailbox_log.straggler = 5 * MS
        lost = self.random.choice(self.runners) if self.random.random() < 0.3 else None
        for process in self.processes:
            if process is lost:
                process.crash()
                process.is_gone = True  # the others take over
                continue
            process.go_on()
            process.start()
            if not self.is_bounded:
                process.change_rate(EXACT)

    def _require_owners(self) -> None:
        require = self.world.require
        for mailbox_log in self.mailbox_logs:
            mailbox = mailbox_log.mailbox
            lease = self.log.leases.get(mailbox)
            assert lease is not None
            require(lease.is_held, "every mailbox has an owner", lease)
            owners = [runner.name for runner in self.runners if runner.may_append(mailbox)]
            require(owners == [lease.runner], "the owner appends", owners, lease)
            require(mailbox_log.epoch == lease.epoch, "the owner has the log", mailbox_log.epoch, lease)
            tables = {admin.name: admin.table.routes for admin in self.admins}
            tables |= {proxy.name: proxy.table for proxy in self.proxies}
            for name, table in tables.items():
                route = table.get(mailbox)
                require(
                    route is not None and (route.runner, route.epoch) == (lease.runner, lease.epoch),
                    "all admins and proxies have the route",
                    name,
                    route,
                    lease,
                )


def trace_line(entry: tuple[Any, ...]) -> str:
    """Return a line of the trace as people read it."""
    at, *what = entry
    return f"{at / 1_000:9.1f} ms  " + " ".join(map(brief, what))


def brief(what: Any) -> str:
    """Return the fields of a lease or event that matter here."""
    if isinstance(what, Lease | LeaseEvent):
        kind = type(what).__name__
        return f"{kind}({what.mailbox}, {what.runner}, epoch {what.epoch}, version {what.version})"
    return str(what)


def run(seed: int) -> Cluster:
    """Run one seed.

    Raises: UnsafeStep with the end of the trace, and how to repeat it.
    """
    cluster = Cluster(seed)
    try:
        cluster.run()
    except UnsafeStep as error:
        lines = [
            *map(trace_line, cluster.world.trace[-40:]),
            f"Seed {seed}: {', '.join(map(brief, error.args))}.",
        ]
        raise UnsafeStep("\n".join([*lines, f"Repeat it: make simulation SEED={seed} SEEDS=1"])) from None
    return cluster
