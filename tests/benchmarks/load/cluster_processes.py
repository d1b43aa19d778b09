"""A cluster of real processes on loopback: NATS servers, admins, proxies and runners."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.servers.nats_cluster import NatsCluster
from tests.support.servers.postroom import PostroomProcess

ADMINS, PROXIES = 2, 3
TTL_MS, HEARTBEAT_MS, GRACE_MS, MEMBER_TTL_MS = 6_000, 2_000, 1_000, 3_000
"""A tenth to a fiftieth of the defaults, so that leases expire while they are watched."""
ANY_PORT = "127.0.0.1:0"


class ClusterProcesses:
    """Three NATS servers, two admins and three proxies, and the runners that are started.

    Arguments:
        folder: of all their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._opened = ExitStack()
        self.nats = NatsCluster(folder / "nats")
        self.proxy_ids = [f"proxy-{number}" for number in range(1, PROXIES + 1)]
        self._admins: list[PostroomProcess] = []
        self._proxies: list[PostroomProcess] = []
        self.store = str(folder / "mailboxes.db")

    @property
    def admins(self) -> list[str]:
        """Return the addresses of the admins."""
        return [each.address for each in self._admins]

    @property
    def proxies(self) -> list[str]:
        """Return the addresses of the proxies."""
        return [each.address for each in self._proxies]

    def start_runner(self, name: str, mailboxes: list[str], *, store: str | None = None) -> PostroomProcess:
        """Start a runner, and return once it serves its address; its mailboxes follow.

        Arguments:
            store: address; None is the SQLite file that runners share.
        """
        arguments = ["--admin", ",".join(self.admins), "--runner-id", name, "--proxy-id", self.proxy_ids[0]]
        for mailbox in mailboxes:
            arguments += ["--mailbox", mailbox]
        command = ["runner", *arguments, "--store", store or self.store, "--listen", ANY_PORT, "--dev"]
        runner = PostroomProcess(self._folder / name, command, log_level="warning")
        self._opened.enter_context(runner)
        return runner

    def __enter__(self) -> Self:
        with self._opened as opened:
            opened.enter_context(self.nats)
            for number in range(1, ADMINS + 1):
                self._admins.append(opened.enter_context(self._admin(number)))
            for name in self.proxy_ids:
                command = [
                    "proxy",
                    "--admin",
                    ",".join(self.admins),
                    "--proxy-id",
                    name,
                    "--listen",
                    ANY_PORT,
                ]
                proxy = PostroomProcess(self._folder / name, command, log_level="warning")
                self._proxies.append(opened.enter_context(proxy))
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()

    def _admin(self, number: int) -> PostroomProcess:
        folder = self._folder / f"admin-{number}"
        settings = {
            "admin": {
                "jetstream": self.nats.url,
                "monitoring": self.nats.monitoring,
                "store": str(folder / "tables.db"),
                "listen": ANY_PORT,
                "ttl_ms": TTL_MS,
                "heartbeat_interval_ms": HEARTBEAT_MS,
                "grace_period_ms": GRACE_MS,
                "member_ttl_ms": MEMBER_TTL_MS,
            }
        }
        return PostroomProcess(folder, ["admin"], settings, log_level="warning")
