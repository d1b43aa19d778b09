"""Background tasks end with their context."""

import asyncio
import sys

import pytest

from postroom.application.threads import background_task, cancel_and_wait, new_event_loop, wait_at_most
from tests.support.waiting import within


async def test_a_background_task_runs_during_the_context_and_ends_with_it() -> None:
    steps: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    async with background_task(work()):
        await within(started.wait())
        steps.append("block")
    assert steps == ["block", "ended"]


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again() -> None:
    forgotten = 0

    async def forgetful() -> None:
        nonlocal forgotten
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                forgotten += 1
                if forgotten == 2:
                    raise

    task = asyncio.create_task(forgetful())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert forgotten == 2


async def test_the_exception_of_a_cancelled_task_is_ignored() -> None:
    async def fails() -> None:
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert isinstance(task.exception(), ValueError)


async def test_a_wait_ends_with_its_event_or_its_time_and_is_cancelled_with_its_caller() -> None:
    event = asyncio.Event()
    await wait_at_most(0.001, event.wait())
    waiting = asyncio.create_task(wait_at_most(600, event.wait()))
    await asyncio.sleep(0)
    event.set()
    await asyncio.wait_for(waiting, 60)
    cancelled = asyncio.create_task(wait_at_most(600, asyncio.Event().wait()))
    await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_owners_event_loop_is_that_of_uvloop_if_it_is_installed(
    monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    if not is_installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    try:
        assert loop.run_until_complete(asyncio.sleep(0, "works")) == "works"
        assert type(loop).__module__.startswith("uvloop") == is_installed
    finally:
        loop.close()
