"""Work beside other work ends when it should."""

import asyncio

from postroom.application.background import beside, end


async def test_work_goes_on_beside_the_block_and_ends_with_it() -> None:
    steps: list[str] = []
    started = asyncio.Event()

    async def work() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            steps.append("ended")

    async with beside(work()):
        await started.wait()
        steps.append("block")
    assert steps == ["block", "ended"]


async def test_a_task_that_forgets_that_it_was_cancelled_is_cancelled_again() -> None:
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
    await end(task)
    assert forgotten == 2


async def test_what_a_task_failed_with_is_no_news_when_it_is_ended() -> None:
    async def fails() -> None:
        raise ValueError

    task = asyncio.create_task(fails())
    await asyncio.sleep(0)
    await end(task)
    assert isinstance(task.exception(), ValueError)
