"""`postroom redrive` has every criterion, and its jobs outlast the processes of its commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from postroom.adapters.cli import redrive
from postroom.adapters.cli.output import Output
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose import open_mailbox
from postroom.application.messages import NewMessage
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.redrives import (
    CANCEL,
    EVERY_FIELD,
    FULL,
    RESCHEDULE,
    add_dead_letters,
    dead_ids,
    send,
)
from tests.support.stores import MAILBOX

JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
OPTIONS: dict[str, Any] = {
    "text": "smith",
    "match": "word pre*",
    "topic": ["orders.*", "mail"],
    "reason": ["max_attempts"],
    "fingerprint": ["0123456789abcdef"],
    "id_": ["m1"],
    "dead_since": "1000",
    "dead_until": "2000",
    "since": "3000",
    "until": "4000",
    "principal": ["ann"],
    "correlation_id": "c1",
    "trace_id": "0123456789abcdef0123456789abcdef",
    "namespace": "acme",
    "header": ["region=eu"],
    "rate": 5,
    "delay": "1s",
    "limit": 6,
    "to": "repair",
    "set_header": ["by=ops"],
    "remove_header": ["old"],
    "merge_patch": '{"a": 1}',
    "key": ["ann"],
}
Run = Callable[..., Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs a command and returns its answer."""
    monkeypatch.chdir(tmp_path)

    async def run_command(command: Any, *arguments: Any, **options: Any) -> Any:
        settings = load_settings({"store": "store.db", "mailbox": MAILBOX}, {}, None)
        await command(Session("test", settings, Output(True)), *arguments, **options)
        return json.loads(capsys.readouterr().out)

    return run_command


def opened() -> Any:
    return open_mailbox("store.db", MAILBOX, durability="relaxed")


async def test_each_option_is_a_field_of_the_selection(run: Run) -> None:
    fields = {*RedriveSpec.__struct_fields__}
    specs = (EVERY_FIELD, CANCEL, RESCHEDULE)
    assert fields == {
        name for name in fields for spec in specs if getattr(spec, name) != getattr(RedriveSpec(), name)
    }
    async with opened():
        pass  # the store is there
    report = await run(redrive.start, **OPTIONS, job_id=JOB)
    assert msgspec.convert(report["spec"], RedriveSpec) == EVERY_FIELD
    assert (report["job_id"], report["status"], report["matched"]) == (JOB, "completed", 0)
    options = {"note": CANCEL.note, "status": CANCEL.statuses, "yes": True}
    report = await run(redrive.start, action="cancel", topic=["orders"], key=["ann"], **options)
    assert msgspec.convert(report["spec"], RedriveSpec) == CANCEL
    at = "1970-01-01T00:00:05Z"
    report = await run(redrive.start, action="reschedule", id_=["m1"], at=at, limit=2)
    assert msgspec.convert(report["spec"], RedriveSpec) == RESCHEDULE


async def test_a_cancellation_is_confirmed_and_a_rescheduling_has_a_time(run: Run) -> None:
    async with opened() as mailbox:
        await send(mailbox, ["a", "b"])
    with pytest.raises(WrongUsage, match="A cancel can't be undone; add --yes"):
        await run(redrive.start, action="cancel")
    for times in ({}, {"delay": "0", "at": "2030-01-01T00:00Z"}):
        with pytest.raises(WrongUsage, match="either --delay or --at"):
            await run(redrive.start, action="reschedule", **times)
    preview = await run(redrive.start, action="cancel", dry_run=True)
    assert [(each["reason"], each["count"]) for each in preview["groups"]] == [("ready", 2)]
    assert (await run(redrive.start, action="reschedule", delay="1h"))["moved"] == 2
    assert (await run(redrive.start, action="cancel", yes=True))["moved"] == 2


async def test_a_job_is_paused_resumed_cancelled_and_undone_by_commands_that_each_own_the_mailbox(
    run: Run,
) -> None:
    async with opened() as mailbox:
        await mailbox.set_topic_policy("orders", FULL)
        await add_dead_letters(mailbox, ["a", "b", "c"])
        ready = [f"r{number}" for number in range(9)]
        await mailbox.send_batch(
            [NewMessage(topic="orders", payload=b"x", message_id=each) for each in ready]
        )
    assert (await run(redrive.start, topic=["orders"], job_id=JOB, detach=True))["status"] == "running"
    assert (await run(redrive.pause, JOB))["status"] == "paused"
    async with opened() as mailbox:  # a new failure, and room for the job
        for each in await mailbox.receive_messages("orders", max_messages=9):
            await (each.nack(reason="late") if each.message_id == "r0" else each.ack())
    resumed = await run(redrive.resume, JOB)
    assert (resumed["status"], resumed["moved"]) == ("completed", 3)
    async with opened() as mailbox:
        assert await dead_ids(mailbox) == ["r0"]
        assert len(await mailbox.receive_messages("orders", max_messages=1)) == 1
    undone = await run(redrive.undo, JOB)
    assert (undone["status"], undone["restored"], undone["retained"]) == ("undone", 2, 1)
    (job,) = (await run(redrive.list_jobs))["jobs"]
    assert job["spec"] == {"topics": ["orders"]}
