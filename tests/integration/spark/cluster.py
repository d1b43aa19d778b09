"""Jobs on a Spark cluster whose nodes have nothing of ours but what `make spark-bundle` built."""

import json
import os
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from postroom.projections.spark.session import SCHEDULER_OPTIONS
from tests.support.servers.process import LOOPBACK, end_with_parent
from tests.support.servers.spark import SparkCluster, archive_options, spark_home
from tests.support.waiting import SECONDS

REPOSITORY = Path(__file__).parents[3]
JOB_SECONDS = 800
"""Below the time that a test may take: three JVMs start, also on a machine with many other processes."""


@dataclass(frozen=True)
class Bundle:
    """What `make spark-bundle` built, its environment unpacked where drivers run."""

    folder: Path

    @classmethod
    def build(cls, folder: Path) -> "Bundle":
        built = subprocess.run(
            [REPOSITORY / "scripts/spark-bundle.sh", folder],
            env=os.environ | {"COMPRESS_LEVEL": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert built.returncode == 0, built.stdout + built.stderr
        with tarfile.open(folder / "postroom-env.tar.gz") as archive:
            archive.extractall(folder / "env", filter="fully_trusted")
        return cls(folder)

    @property
    def code(self) -> Path:
        return self.folder / "postroom-spark.zip"

    @property
    def python(self) -> Path:
        return self.folder / "env/bin/python"


class Job:
    """An entry point of the bundle that `spark-submit` runs on a cluster."""

    def __init__(
        self,
        bundle: Bundle,
        cluster: SparkCluster,
        folder: Path,
        *command: str,
        store: str,
        is_shipped: bool = False,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """Start the job.

        Arguments:
            settings: settings of Spark, besides those that every job has.
            is_shipped: whether Spark unpacks the environment for each executor, which takes seconds of CPU;
                otherwise, they use that of the driver.
        """
        self._events = folder / "events"
        self._events.mkdir()
        settings = dict(settings or {}) | {
            "spark.driver.extraJavaOptions": f"{SCHEDULER_OPTIONS} {archive_options()}",
            "spark.driver.host": LOOPBACK,
            "spark.driver.maxResultSize": "1m",
            "spark.driver.memory": "512m",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": self._events.as_uri(),
            "spark.eventLog.enabled": "true",
            "spark.eventLog.rolling.enabled": "false",
            "spark.executor.extraJavaOptions": f"{SCHEDULER_OPTIONS} {archive_options()}",
            "spark.executor.memory": "512m",
            "spark.log.level": "WARN",
            "spark.pyspark.python": "./env/bin/python" if is_shipped else str(bundle.python),
            # Both workers are there before the first task is handed out.
            "spark.scheduler.maxRegisteredResourcesWaitingTime": "120s",
            "spark.scheduler.minRegisteredResourcesRatio": "1.0",
            "spark.ui.enabled": "false",
        }
        home = spark_home()
        shipped = ["--py-files", bundle.code.name]
        if is_shipped:
            shipped += ["--archives", "postroom-env.tar.gz#env"]
        options = [f"--conf={name}={value}" for name, value in settings.items()]
        known = {name: os.environ[name] for name in ("PATH", "JAVA_HOME") if name in os.environ}
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [home / "bin/spark-submit", "--master", cluster.url, *shipped, *options, *command],
                cwd=bundle.folder,
                env={**known, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": LOOPBACK, "POSTROOM_STORE": store},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,
            )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def result(self) -> dict[str, Any]:
        """Wait for the end and return the JSON that the job printed."""
        code = self.process.wait(timeout=JOB_SECONDS)
        assert code == 0, self.said()[-5_000:]
        report: dict[str, Any] = json.loads(
            next(line for line in self.said().splitlines() if line[:1] == "{")
        )
        return report

    def said(self) -> str:
        """Return what the job and Spark printed."""
        return self._log.read_text("utf-8")

    def tasks(self, reason: str = "Success") -> list[dict[str, Any]]:
        """Return the tasks that ended for a reason, as Spark's event log tells of them."""
        return [
            event
            for event in self.events()
            if event["Event"] == "SparkListenerTaskEnd" and event["Task End Reason"]["Reason"] == reason
        ]

    def lost(self) -> set[str]:
        """Return the RDDs that tasks of executors that were lost computed."""
        stages = {task["Stage ID"] for task in self.tasks("ExecutorLostFailure")}
        submitted = [
            event["Stage Info"] for event in self.events() if event["Event"] == "SparkListenerStageSubmitted"
        ]
        return {
            rdd["Name"] for stage in submitted if stage["Stage ID"] in stages for rdd in stage["RDD Info"]
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield Spark's event log of this job."""
        (log,) = self._events.iterdir()
        with log.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
