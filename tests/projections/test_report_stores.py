"""Reports on other stores than a whole log in SQLite: PostgreSQL, archives, and after retention."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.reports import make_report, whatif_report
from postroom.adapters.postgres.event_log import PostgresEventLog
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
from postroom.domain.policy_grid import policy_grid
from postroom.domain.settings import SettingsChanges
from postroom.projections.reports.report import REPORTS
from postroom.projections.spark.options import LogSelection
from tests.conformance.records import append
from tests.projections.report_logs import BOXES, past, write

GRID = policy_grid(max_attempts=(1, 2))
MAILBOX = "main@test"


def reports_of(store: str, archive: str | None = None) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of all reports."""
    made = [*REPORTS.values(), whatif_report(store, GRID, archive=archive)]
    tables: dict[str, pa.Table] = {
        report.name: make_report(store, report, selection=LogSelection(), archive=archive, engine="local")
        for report in made
    }
    return {name: table.to_pylist() for name, table in tables.items()}


def test_a_log_in_postgresql_has_the_reports_that_it_has_in_sqlite(
    postgres_store: str, tmp_path: Path
) -> None:
    logs = {mailbox: past(mailbox, 40) for mailbox in BOXES}
    store = str(tmp_path / "store.db")
    write(store, logs)
    for mailbox, events in logs.items():
        with closing(PostgresEventLog(postgres_store, mailbox, durability="relaxed")) as log:
            append(log, events)
    assert reports_of(postgres_store) == reports_of(store)


async def settle_messages(store: str, *ids: str) -> None:
    """Send messages of which consumers fail the first and ack the others, and remove what is dead."""
    policy = TopicPolicy(max_attempts=2)
    async with open_mailbox(store, MAILBOX) as mailbox:
        await mailbox.set_topic_policy("orders", policy)
        for id_ in ids:
            await mailbox.send_message(NewMessage(topic="orders", payload=b"{}", message_id=id_))
        while batch := await mailbox.receive_messages("orders", max_messages=10):
            for message in batch:
                if message.message_id == ids[0]:
                    await mailbox.nack_messages([message.receipt], reason="HTTP 503", delay_ms=0)
                else:
                    await mailbox.ack_messages([message.receipt])
        await mailbox.purge_topic("orders")


async def retain(store: str, archive: str) -> int:
    """Let retention remove what it may, and return how many events."""
    async with open_mailbox(store, MAILBOX, archive=archive) as mailbox:
        await mailbox.set_settings(SettingsChanges({"history_retention_ms": 1}))
        await asyncio.sleep(0.01)
        return await mailbox.retention.enforce_age()


def test_with_the_archive_reports_are_those_before_retention_and_without_it_those_of_the_rest(
    tmp_path: Path,
) -> None:
    store, archive = str(tmp_path / "store.db"), str(tmp_path / "archive")
    asyncio.run(settle_messages(store, "one", "two", "three"))
    before = reports_of(store)
    assert asyncio.run(retain(store, archive)) > 10
    assert reports_of(store, archive) == before
    assert {name: rows for name, rows in reports_of(store).items() if rows} == {}

    asyncio.run(settle_messages(store, "three", "two"))  # ids that the archive has, too
    rest, whole = reports_of(store), reports_of(store, archive)
    for name in ("latency", "traffic", "sla", "whatif"):
        assert (rest[name][0]["messages"], sum(row["messages"] for row in whole[name]) % 5) == (2, 0), name
    assert (rest["whatif"][0]["dead_lettered_best"], whole["whatif"][0]["dead_lettered_best"]) == (1, 2)
    assert (rest["latency"][0]["acked"], whole["whatif"][0]["settled_best"]) == (1, 3)
