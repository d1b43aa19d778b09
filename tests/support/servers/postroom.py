"""Long-running commands of `postroom` in processes of their own."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.support.servers.process import ServerProcess

START_SECONDS = 120.0


class PostroomProcess:
    """A command that serves until it is stopped, and reports its address when it is ready.

    Arguments:
        folder: of its settings and its log; created if missing.
        command: its name and arguments.
        settings: tables of its settings file.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        log_level: str = "info",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        config = folder / "postroom.toml"
        config.write_text(
            "\n".join(
                f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items())
                for name, table in (settings or {}).items()
            )
        )
        postroom = Path(sys.executable).parent / "postroom"
        options = ["--json", "--log-level", log_level, "--config", str(config)]
        self._log = folder / "output.log"
        self.process = ServerProcess(
            f"postroom {command[0]}", [postroom, command[0], *options, *command[1:]], self._log
        )
        self.report: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Return `host:port` of its gRPC server."""
        return str(self.report["address"]).rpartition("//")[2]

    @property
    def log(self) -> str:
        """Return what it wrote."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        self._log.write_bytes(b"")
        self.process.start(self._is_ready, START_SECONDS)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stop()

    def _is_ready(self) -> bool:
        for line in self.log.splitlines():
            if line.startswith("{") and '"address"' in line:
                report = json.loads(line)
                if "event" not in report:
                    self.report = report
                    return True
        return False
