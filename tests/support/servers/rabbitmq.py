"""A RabbitMQ server of the system's package, run as a process of ours, without its service."""

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from postroom.domain.errors import Unavailable
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port, listens
from tests.support.servers.server import LoopbackServer, find_binary

PACKAGES = Path("/usr/lib/rabbitmq/lib")
"""Folder of the servers in packages of Debian, whose command on the path starts the system's service."""


class RabbitmqServer(LoopbackServer):
    """A RabbitMQ server on loopback, which keeps its port and data when restarted.

    Arguments:
        folder: directory of its data; created if missing.

    Raises: Unavailable when there is no rabbitmq-server.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "enabled_plugins").write_text("[].\n")
        binary, port, names = _binary(), free_port(), free_port()
        settings = {
            "HOME": folder,
            "ERL_EPMD_ADDRESS": LOOPBACK,
            "ERL_EPMD_PORT": names,
            "RABBITMQ_NODENAME": f"test{port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
            "RABBITMQ_NODE_PORT": port,
            "RABBITMQ_DIST_PORT": free_port(),
            "RABBITMQ_MNESIA_BASE": folder / "data",
            "RABBITMQ_LOG_BASE": folder / "log",
            "RABBITMQ_CONFIG_FILE": folder / "none",
            "RABBITMQ_CONF_ENV_FILE": folder / "none",
            "RABBITMQ_ENABLED_PLUGINS_FILE": folder / "enabled_plugins",
            "RUNNING_UNDER_SYSTEMD": "true",  # the script is replaced by the server, whose signals are ours
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none",
        }
        environment = [f"{name}={value}" for name, value in settings.items()]
        log = folder / "rabbitmq.log"
        super().__init__(ServerProcess("rabbitmq-server", ["env", *environment, binary], log), port)
        # The server would start this daemon itself, and leave it running.
        self._names = ServerProcess(
            "epmd", [find_binary("epmd", "install erlang"), "-address", LOOPBACK, "-port", str(names)], log
        )
        self._names_port = names
        self._resources = ExitStack()

    @property
    def url(self) -> str:
        """Return where clients connect to."""
        return f"amqp://{LOOPBACK}:{self._port}"

    def __enter__(self) -> Self:
        self._names.start(lambda: listens(self._names_port))
        with ExitStack() as started:
            started.callback(self._names.stop)
            super().__enter__()
            self._resources = started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._resources:
            super().__exit__(kind, error, trace)


def _binary() -> Path:
    packaged = sorted(PACKAGES.glob("*/sbin/rabbitmq-server"))
    if packaged:
        return packaged[-1]
    try:
        return find_binary("rabbitmq-server", "install your system's rabbitmq-server package")
    except Unavailable as error:
        raise Unavailable(f"There is no RabbitMQ server: {error}") from error
