"""What a worker reports of itself, and that it works whether or not it is heard."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from postroom import Worker, open_mailbox
from postroom.adapters.compose import OwnedMailbox
from postroom.application import worker_reports
from postroom.application.worker_reports import HandlerState, WorkerState
from postroom.application.workers import reporting
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, Unavailable
from tests.support.access import controlled_mailbox, mailbox_of
from tests.support.namespaces import open_namespace
from tests.support.waiting import SECONDS, until_answer, within
from tests.support.worker_runs import running, send, unsettled


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporting, "REPORT_SECONDS", 0.01)


async def test_a_worker_is_listed_with_what_it_does_until_it_stops(mailbox: OwnedMailbox) -> None:
    worker, release = Worker("shop", version="2026.11"), asyncio.Event()

    @worker.consumer("orders", concurrency=3)
    async def ship(data: bytes) -> None:
        if data == b"bad":
            raise ValueError("no")
        await release.wait()

    @worker.consumer("mail.*")
    async def post(_: bytes) -> None: ...

    await send(mailbox, b"1", b"2", b"bad")

    async def is_busy() -> bool:
        handlers = [each.handlers[0] for each in await mailbox.list_workers()]
        return [(each.in_use, each.failed) for each in handlers] == [(2, 2)]

    async with running(worker, mailbox):
        await until_answer(is_busy)
        (report,) = await mailbox.list_workers()
        (consumer,) = await mailbox.list_consumers()
        release.set()
    place = f"{gethostname()}:{os.getpid()}"
    assert (report.name, report.host, report.process) == ("shop", gethostname(), os.getpid())
    assert (report.version, report.is_stale, report.principal) == ("2026.11", False, None)
    ships, posts = report.handlers
    assert ships == HandlerState("orders", ship.__qualname__, consumer.consumer, 3, 2, 0, 2)
    assert (posts.topic, posts.concurrency, posts.in_use) == ("mail.*", 1, 0)
    assert posts.consumer.endswith(place)
    assert await mailbox.list_workers() == []


async def test_a_worker_that_is_cancelled_has_ended(mailbox: OwnedMailbox) -> None:
    worker = Worker()
    worker.consumer("orders")(_ignore)
    task = asyncio.create_task(worker.run(mailbox))
    await until_answer(mailbox.list_workers)
    task.cancel()
    await asyncio.wait([task], timeout=SECONDS)
    assert await mailbox.list_workers() == []


@pytest.mark.parametrize(
    "refusal", [InvalidRequest("There is no query 'report_worker'."), Unavailable("busy"), TypeError("odd")]
)
async def test_a_worker_whose_reports_fail_handles_its_messages(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    calls = 0

    async def refuse(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        raise refusal

    monkeypatch.setattr(mailbox, "report_worker", refuse)
    worker, handled = Worker(), asyncio.Event()

    @worker.consumer("orders")
    async def handle(_: bytes) -> None:
        handled.set()

    async with running(worker, mailbox):
        await send(mailbox, b"1")
        await within(handled.wait())
    assert await unsettled(mailbox) == {}
    assert calls > 0


async def test_a_worker_of_another_version_is_heard_by_the_next_owner(
    mailbox: OwnedMailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "REFUSED_SECONDS", 0.01)
    report, refusals = mailbox.report_worker, 3

    async def refuse_first(*arguments: Any, **options: Any) -> None:
        nonlocal refusals
        refusals -= 1
        if refusals >= 0:
            raise InvalidRequest("There is no query 'report_worker'.")
        await report(*arguments, **options)

    monkeypatch.setattr(mailbox, "report_worker", refuse_first)
    worker = Worker()
    worker.consumer("orders")(_ignore)
    async with running(worker, mailbox):
        await until_answer(mailbox.list_workers)


async def test_a_worker_of_a_namespace_reports_to_each_of_its_mailboxes_and_is_listed_once() -> None:
    worker = Worker("shop")
    worker.consumer("orders")(_ignore)
    async with open_namespace("acme@one", "acme@two", "acme@three") as namespace:
        async with running(worker, namespace):
            await until_answer(namespace.list_workers)
            (report,) = await namespace.list_workers()
            assert (report.name, report.handlers[0].topic) == ("shop", "orders")
        assert await namespace.list_workers() == []


async def test_a_token_of_some_topics_reports_and_sees_handlers_of_these_only() -> None:
    handlers = tuple(HandlerState(each, "handle", "", 1) for each in ("orders", "secret", "orders.*"))
    worker = WorkerState("shop", "host-1", 7, "", "", 0, handlers)
    async with controlled_mailbox() as place:
        limited = await mailbox_of(place, topics=["orders"], principal="shop")
        await limited.report_worker(_id(1), worker, principal="root")
        every = await mailbox_of(place, principal="ops")
        await every.report_worker(_id(2), worker)
        first, second = await place.mailbox.list_workers()
        assert ([each.topic for each in first.handlers], first.principal) == (["orders"], "shop")
        assert (len(second.handlers), second.principal) == (3, "ops")
        seen = await limited.list_workers()
        assert [[each.topic for each in report.handlers] for report in seen] == [["orders"]] * 2
        foreign = await mailbox_of(place, topics=["mail"], principal="mail")
        assert await foreign.list_workers() == []
        await foreign.report_worker(_id(1), worker, ended=True)
        assert len(await place.mailbox.list_workers()) == 2
        reader = await mailbox_of(place, operations=[Right.READ_HEADERS])
        with pytest.raises(Exception, match="recv"):
            await reader.report_worker(_id(3), worker)


WORKER = """
import asyncio
from postroom import Worker, connect
from postroom.application.workers import reporting

reporting.REPORT_SECONDS = 0.02
worker = Worker("paused")

@worker.consumer("orders")
async def handle(_: bytes) -> None: ...

async def main() -> None:
    async with connect({store!r}) as mailbox:
        await worker.run(mailbox)

asyncio.run(main())
"""


async def test_a_worker_that_is_paused_by_a_signal_fades_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_reports, "STALE_MS", 500)
    store = str(tmp_path / "store.db")
    async with open_mailbox(store) as mailbox:

        async def is_(stale: bool) -> bool:
            workers = await mailbox.list_workers()
            return [(each.name, each.is_stale) for each in workers] == [("paused", stale)]

        code = WORKER.format(store=store)
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stderr=PIPE)
        try:
            await until_answer(lambda: is_(False))
            process.send_signal(signal.SIGSTOP)
            await until_answer(lambda: is_(True))
            process.send_signal(signal.SIGCONT)
            await until_answer(lambda: is_(False))
        finally:
            process.kill()
            await process.wait()
        await until_answer(lambda: is_(True))  # it could not say that it ended


async def _ignore(_: bytes) -> None: ...


def _id(number: int) -> str:
    return f"0199d3a0-0000-4000-8000-{number:012}"
