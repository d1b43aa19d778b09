"""How Spark is started: by us, or by `spark-submit`, whose word goes before ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers.spark import spark_home

START = """
import json
from postroom.projections.spark.session import start_context

context = start_context({"spark.app.name": "ours", "spark.driver.memory": "700m"})
executable = context.parallelize([0], 1).map(lambda _: __import__("sys").executable).first()
names = ("spark.app.name", "spark.driver.memory", "spark.ui.enabled")
settings = {name: context.getConf().get(name) for name in names}
print(json.dumps({"master": context.master, "python": executable, **settings}))
"""


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {name: value for name, value in os.environ.items() if not name.startswith(("PYSPARK", "SPARK"))}
    return subprocess.run(
        command, env={**known, **environment}, capture_output=True, text=True, check=False, timeout=900
    )


@pytest.mark.extended
def test_what_spark_submit_was_told_goes_before_ours(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(START)
    python = tmp_path / "python"
    python.symlink_to(sys.executable)
    told = {"spark.pyspark.driver.python": sys.executable, "spark.pyspark.python": str(python)}
    ran = run(
        spark_home() / "bin/spark-submit",
        *(
            "--master",
            "local[3]",
            "--driver-memory",
            "600m",
            "--driver-java-options",
            "-XX:TieredStopAtLevel=1",
        ),
        *(f"--conf={name}={value}" for name, value in {**told, "spark.app.name": "theirs"}.items()),
        script,
        SPARK_HOME=str(spark_home()),
        PYTHONPATH=os.pathsep.join(path for path in sys.path if path),
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert json.loads(ran.stdout.splitlines()[-1]) == {
        "master": "local[3]",
        "python": str(python),
        "spark.app.name": "theirs",
        "spark.driver.memory": "600m",
        "spark.ui.enabled": "false",
    }


def test_spark_that_does_not_start_is_one_sentence(tmp_path: Path) -> None:
    java = tmp_path / "bin/java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'This is no Java.' >&2\nexit 1\n")
    java.chmod(0o755)
    start = "from postroom.projections.spark.session import start_context; start_context()"
    ran = run(sys.executable, "-c", start, JAVA_HOME=str(tmp_path))
    assert "This is no Java." in ran.stderr
    assert "Unavailable: Spark did not start" in ran.stderr.splitlines()[-1]
