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
        tls: certificate, key and the authority of clients' certificates; None is without TLS. A certificate
            authenticates the user that is its common name.
        login: the only user and its password; None is the server's default.

    Raises: Unavailable when there is no rabbitmq-server.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tls: tuple[str, str, str] | None = None,
        login: tuple[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "enabled_plugins").write_text(f"[{'rabbitmq_auth_mechanism_ssl' if tls else ''}].\n")
        binary, port, names = _binary(), free_port(), free_port()
        self._tls_port = free_port()
        self._login = login
        (folder / "rabbitmq.conf").write_text(_configuration(self._tls_port, tls, login))
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
            "RABBITMQ_CONFIG_FILE": folder / "rabbitmq.conf",
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
        """Return where clients connect to, with the login if there is one."""
        login = "" if self._login is None else f"{':'.join(self._login)}@"
        return f"amqp://{login}{LOOPBACK}:{self._port}"

    @property
    def tls_url(self) -> str:
        """Return where clients connect to with TLS, without a login."""
        return f"amqps://{LOOPBACK}:{self._tls_port}"

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


def _configuration(port: int, tls: tuple[str, str, str] | None, login: tuple[str, str] | None) -> str:
    """Return the content of rabbitmq.conf; `port` is that of TLS."""
    lines: list[str] = []
    if login is not None:
        lines += [f"default_user = {login[0]}", f"default_pass = {login[1]}"]
    if tls is not None:
        names = ("certfile", "keyfile", "cacertfile")
        lines += [f"listeners.ssl.default = {LOOPBACK}:{port}", "ssl_options.verify = verify_peer"]
        lines += [f"ssl_options.{name} = {path}" for name, path in zip(names, tls, strict=True)]
        lines += ["auth_mechanisms.1 = PLAIN", "auth_mechanisms.2 = EXTERNAL"]
        lines += ["ssl_cert_login_from = common_name"]
    return "".join(f"{line}\n" for line in lines)


def _binary() -> Path:
    packaged = sorted(PACKAGES.glob("*/sbin/rabbitmq-server"))
    if packaged:
        return packaged[-1]
    try:
        return find_binary("rabbitmq-server", "install your system's rabbitmq-server package")
    except Unavailable as error:
        raise Unavailable(f"There is no RabbitMQ server: {error}") from error
