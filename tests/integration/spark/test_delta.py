"""A stream over segments and log that is joined with a Delta table, without a jar."""

from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import lit
from pyspark.sql.streaming.query import StreamingQuery

from postroom.spark import register
from tests.integration.spark.streams import start
from tests.projections.stored_logs import ARCHIVED, ONE, TOPICS, TWO, keep, past

pytestmark = pytest.mark.extended


def test_a_batch_of_what_is_available_is_joined_with_a_delta_table(
    spark: SparkSession, tmp_path: Path
) -> None:
    owners, results = str(tmp_path / "owners"), str(tmp_path / "results")
    topics = [*TOPICS, "shop"]
    write_deltalake(
        owners, pa.table({"topic": topics, "team": [f"team {n % 3}" for n in range(len(topics))]})
    )
    columns = pa.schema(
        [("mailbox", pa.string()), ("position", pa.int64()), ("team", pa.string()), ("batch", pa.int64())]
    )
    DeltaTable.create(results, columns)
    register(spark)

    def join(events: DataFrame, batch: int) -> None:
        teams = spark.read.parquet(*DeltaTable(owners).file_uris())
        rows = (
            events.where("event = 'MessageSent'").join(teams, "topic").select("mailbox", "position", "team")
        )
        # A batch that comes again replaces its rows.
        rows = rows.withColumn("batch", lit(batch).cast("long")).toArrow().cast(columns)
        write_deltalake(results, rows, mode="overwrite", predicate=f"batch = {batch}")

    with ExitStack() as stack:
        kept = keep("archive sqlite", str(tmp_path / "store.db"), tmp_path / "archive", stack)

        def run() -> None:
            stream = spark.readStream.format("postroom_events").options(max_rows="30", **kept.options).load()
            writer = stream.writeStream.foreachBatch(join).option("checkpointLocation", str(tmp_path / "c"))
            start(writer.trigger(availableNow=True), StreamingQuery.awaitTermination)

        run()
        kept.write(TWO, past(TWO, 4, 100))
        run()
        sent = [
            (extent.name, record.position)
            for extent, record in kept.everything()
            if record.type == "MessageSent"
        ]
    table = DeltaTable(results).to_pyarrow_table()
    assert sorted(zip(table["mailbox"].to_pylist(), table["position"].to_pylist(), strict=True)) == sorted(
        sent
    )
    assert min(position for mailbox, position in sent if mailbox == ONE) < ARCHIVED[ONE]
    assert len(set(table["batch"].to_pylist())) > 2
