"""A standalone Spark cluster, from the package `pyspark`: a master and its workers on loopback."""

import json
import os
import sys
import urllib.request
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from postroom.domain.errors import Unavailable
from tests.support.servers.process import LOOPBACK, ServerProcess, free_port

JVM_SECONDS = 120.0
"""A JVM may take long to start while others use the machine."""
_DEPLOY = "org.apache.spark.deploy"
_CLASS_ARCHIVE = Path(sys.prefix, "spark-classes.jsa")


def archive_options() -> str:
    """Return the Java options that load Spark's classes from their archive, if `make test` wrote one.

    A JVM that the archive does not fit would print a warning, so all its own logging is off.
    """
    return f"-XX:SharedArchiveFile={_CLASS_ARCHIVE} -Xlog:disable" if _CLASS_ARCHIVE.exists() else ""


class SparkCluster:
    """A Spark master and workers of one core each, which have no Python but that of the applications.

    Arguments:
        folder: directory of logs and work files, created if missing; worker n uses `worker-n`.
        workers: how many.
        worker_memory: of each worker, as Spark writes it.
    """

    def __init__(self, folder: Path, workers: int = 2, worker_memory: str = "1g") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._home = spark_home()
        self._port, self._ui = free_port(), free_port()
        own = ["--host", LOOPBACK, "--port", self._port, "--webui-port", self._ui]
        self._master = ServerProcess(
            "Spark master",
            [*self._command(folder), f"{_DEPLOY}.master.Master", *map(str, own)],
            folder / "master.log",
        )
        self.workers = []
        for n in range(workers):
            place = folder / f"worker-{n}"
            place.mkdir(exist_ok=True)
            options = [
                "--host",
                LOOPBACK,
                "--cores",
                "1",
                "--memory",
                worker_memory,
                "--work-dir",
                str(place),
            ]
            options += ["--webui-port", "0", self.url]
            command = [*self._command(place), f"{_DEPLOY}.worker.Worker", *options]
            self.workers.append(ServerProcess("Spark worker", command, folder / f"worker-{n}.log"))

    @property
    def url(self) -> str:
        """Return the master's address, for `spark-submit --master`."""
        return f"spark://{LOOPBACK}:{self._port}"

    def status(self) -> dict[str, Any]:
        """Return the master's state of workers and applications; raise OSError if it can't be reached."""
        with urllib.request.urlopen(f"http://{LOOPBACK}:{self._ui}/json/", timeout=5) as answer:
            status: dict[str, Any] = json.load(answer)
            return status

    def alive(self) -> int | None:
        """Return the number of live workers, or None if the master does not answer."""
        try:
            workers: int = self.status()["aliveworkers"]
        except (OSError, ValueError):  # while it starts it may answer with nothing
            return None
        return workers

    def __enter__(self) -> "SparkCluster":
        with ExitStack() as started:
            started.callback(self._stop)
            self._master.start(lambda: self.alive() == 0, JVM_SECONDS)
            *others, last = self.workers
            for worker in others:
                worker.start(lambda: True)  # a JVM takes long: they start side by side
            last.start(lambda: self.alive() == len(self.workers), JVM_SECONDS)
            started.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        for server in (*self.workers, self._master):
            server.kill()

    def _command(self, cwd: Path) -> list[str]:
        """Return how a Spark class is run, with an environment that leads to no package of ours."""
        variables = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ} | {
            "SPARK_HOME": str(self._home),
            "SPARK_LOCAL_IP": LOOPBACK,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {archive_options()}",
        }
        environment = [f"{name}={value}" for name, value in variables.items()]
        return ["/usr/bin/env", "-i", f"--chdir={cwd}", *environment, str(self._home / "bin" / "spark-class")]


def spark_home() -> Path:
    """Return where the package `pyspark` has Spark's programs and jars."""
    package = find_spec("pyspark")
    if package is None or package.origin is None:
        raise Unavailable("PySpark was not found; install the extra: pip install 'postroom[spark]'.")
    return Path(package.origin).parent
