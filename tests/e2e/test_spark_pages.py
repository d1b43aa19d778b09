"""Commands of docs/spark.md, reports.md and spark-data.md that start Spark."""

import re
import shutil
from pathlib import Path

import pyspark
import pytest

from postroom import NewMessage, connect
from tests.e2e.conftest import ROOT, Postroom

pytestmark = pytest.mark.extended


def read(name: str) -> str:
    return (ROOT / "docs" / name).read_text("utf-8").replace(" projections/", f" {ROOT}/projections/")


def test_a_rebuild_in_one_process_by_spark_submit_and_with_classes_of_an_archive(
    postroom: Postroom, postgres_store: str
) -> None:
    for store in (str(postroom.folder / "orders.db"), postgres_store):
        with connect(store) as mailbox:
            mailbox.send_message(NewMessage("orders", b"1"))
    page = read("spark.md").partition("## A standalone cluster")[0]
    page = page.replace("postgresql://postroom@db/shop", postgres_store)
    page = page.replace("/var/cache/", f"{postroom.folder}/")
    assert len(postroom.run_page(page, ("sh",))) == 6
    assert (postroom.folder / "spark.jsa").stat().st_size > 1 << 20


def test_a_report_by_spark_submit(postroom: Postroom) -> None:
    postroom.ok("send", "orders", "1")
    page = read("reports.md").replace("/reports/sla", str(postroom.folder / "sla"))
    assert len(postroom.run_page(page, ("sh",))) == 1
    assert (postroom.folder / "sla").exists()


def test_pyspark_with_compiled_modules(postroom: Postroom) -> None:
    archive = Path(pyspark.__path__[0]) / "python" / "lib" / "pyspark.zip"
    shutil.copy(archive, postroom.folder)
    (block,) = re.findall(r"^```sh\n(cd .*?)^```", read("spark-data.md"), re.MULTILINE | re.DOTALL)
    _, *lines = block.splitlines()
    assert [postroom.run_on(line, lambda printed: True) for line in lines] == [""] * 3
    assert (postroom.folder / "pyspark.zip").stat().st_size > archive.stat().st_size
