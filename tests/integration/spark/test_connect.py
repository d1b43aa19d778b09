"""The data sources over Spark Connect, whose packages are not in the extra `spark`."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from postroom.application.messages import NewMessage
from tests.projections.histories import send

SECONDS = 600.0
"""A JVM may take long to start while others use the machine."""
SCRIPT = """
import sys
from pyspark.sql import SparkSession
from postroom.spark import register

store = sys.argv[1]
settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g"}
spark = SparkSession.builder.remote("local[2]").config(map=settings).getOrCreate()
print(spark.read.format("postroom_messages").load(store).count())
register(spark)
payloads = spark.read.format("postroom_payloads").schema("payload struct<id: bigint>").load(store)
print(payloads.selectExpr("sum(payload.id)").collect()[0][0])
spark.sql(f"CREATE TEMP VIEW events USING postroom_events OPTIONS (path '{store}', event 'MessageSent')")
print(spark.sql("SELECT count(*) FROM events").collect()[0][0])
spark.stop()
"""


@pytest.mark.skipif(
    any(find_spec(name) is None for name in ("pandas", "grpc_status")), reason="needs pyspark[connect]"
)
def test_the_sources_work_over_spark_connect(tmp_path: Path) -> None:
    store = str(tmp_path / "store.db")
    send(store, "acme@one", [NewMessage(topic="orders", payload=b'{"id": %d}' % id_) for id_ in range(9)])
    command = [sys.executable, "-c", SCRIPT, store]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert run.stdout.split() == ["9", "36", "9"], run.stderr
