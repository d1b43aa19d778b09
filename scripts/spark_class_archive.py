"""Write the classes that Spark loads into an archive, from which its JVMs start in half the CPU time.

Java calls it a dynamic archive of class data sharing. It fits the JVM and the jars that it was made with;
with others, a JVM loads classes as if there were none.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from postroom.projections.spark.session import QUIET, SCHEDULER_OPTIONS, start_session


def main(archive: Path) -> None:
    """Run a small job of each kind in a JVM that writes the archive when it ends.

    Raises: Unavailable when Spark does not start.
    """
    unfinished = archive.with_suffix(".unfinished")
    written_at_exit = f"-XX:ArchiveClassesAtExit={unfinished} -Xlog:disable"
    session = start_session(
        {
            "spark.master": "local[1]",
            "spark.driver.extraJavaOptions": f"{SCHEDULER_OPTIONS} {written_at_exit} {QUIET}",
        }
    )
    context = session.sparkContext
    assert context.parallelize(range(4), 2).map(str).count() == 4
    session.range(10).createOrReplaceTempView("numbers")
    frame = session.sql("SELECT id % 3 AS third, count(*) AS n FROM numbers GROUP BY 1 ORDER BY 1")
    with TemporaryDirectory() as folder:
        frame.write.parquet(f"{folder}/numbers")
        assert session.read.parquet(f"{folder}/numbers").toArrow().num_rows == 3
    process = context._gateway.proc
    session.stop()
    process.stdin.close()  # the JVM ends with its input
    process.wait()
    unfinished.replace(archive)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
