"""What every ownership promises: an adapter's test class inherits the suite and brings an `ownership`."""

import asyncio
import time

import pytest

from postroom.application.ports.lease_store import Ownership
from postroom.application.threads import background_task
from postroom.domain.errors import MailboxOwned
from tests.support.waiting import within

ONE, TWO = "acme@one", "acme$eu west@two"
PATIENT_MS = 60_000


class OwnershipConformance:
    async def test_a_mailbox_has_one_owner_and_the_second_is_told_who(self, ownership: Ownership) -> None:
        async with ownership.acquire(ONE, "process 1 on mars", 0):
            with pytest.raises(
                MailboxOwned, match="Mailbox acme@one is owned by process 1 on mars"
            ) as refused:
                async with ownership.acquire(ONE, "process 2", 0):
                    pytest.fail("owned twice")
            assert refused.value.owner == "process 1 on mars"

    async def test_the_owner_is_told_for_as_long_as_there_is_one(self, ownership: Ownership) -> None:
        assert await ownership.owner(ONE) is None
        async with ownership.acquire(ONE, "process 1 on mars", 0):
            assert await ownership.owner(ONE) == "process 1 on mars"
            assert await ownership.owner(TWO) is None
        assert await ownership.owner(ONE) is None
        async with ownership.acquire(ONE, "process 2", 0):
            assert await ownership.owner(ONE) == "process 2"

    async def test_waiting_ends_in_a_refusal_while_the_owner_stays(self, ownership: Ownership) -> None:
        async with ownership.acquire(ONE, "first", 0):
            with pytest.raises(MailboxOwned, match="first"):
                async with ownership.acquire(ONE, "second", 50):
                    pytest.fail("owned twice")

    async def test_waiting_ends_in_time_though_every_attempt_is_slow(self, ownership: Ownership) -> None:
        delays = 0

        async def delay_every_attempt() -> None:
            nonlocal delays
            while True:
                time.sleep(0.1)  # noqa: ASYNC251 - as a machine that is busy would
                delays += 1
                await asyncio.sleep(0)

        async with ownership.acquire(ONE, "first", 0), background_task(delay_every_attempt()):
            with pytest.raises(MailboxOwned, match="first"):
                async with ownership.acquire(ONE, "second", 1_000):
                    pytest.fail("owned twice")
        assert delays < 40  # ten, and a few while it connects

    async def test_a_released_mailbox_goes_to_whoever_waits(self, ownership: Ownership) -> None:
        order: list[str] = []

        async def second() -> None:
            async with ownership.acquire(ONE, "second", PATIENT_MS):
                order.append("second")

        async with ownership.acquire(ONE, "first", 0):
            waiting = asyncio.create_task(second())
            await asyncio.sleep(0)
            order.append("first")
        await waiting
        assert order == ["first", "second"]

    async def test_an_owner_that_fails_releases_the_mailbox(self, ownership: Ownership) -> None:
        with pytest.raises(ZeroDivisionError):
            async with ownership.acquire(ONE, "first", 0):
                raise ZeroDivisionError
        async with ownership.acquire(ONE, "second", 0):
            pass

    async def test_an_owner_that_is_cancelled_releases_the_mailbox(self, ownership: Ownership) -> None:
        owned = asyncio.Event()

        async def first() -> None:
            async with ownership.acquire(ONE, "first", 0):
                owned.set()
                await asyncio.Event().wait()

        task = asyncio.create_task(first())
        await within(owned.wait())
        task.cancel()
        await asyncio.wait([task])
        async with ownership.acquire(ONE, "second", 0):
            pass

    async def test_two_mailboxes_have_two_owners(self, ownership: Ownership) -> None:
        async with ownership.acquire(ONE, "first", 0), ownership.acquire(TWO, "second", 0):
            with pytest.raises(MailboxOwned, match="second"):
                async with ownership.acquire(TWO, "third", 0):
                    pytest.fail("owned twice")

    async def test_of_many_that_ask_at_once_one_at_a_time_owns(self, ownership: Ownership) -> None:
        owners = 0
        turns: list[int] = []

        async def compete(number: int) -> None:
            nonlocal owners
            async with ownership.acquire(ONE, str(number), PATIENT_MS):
                owners += 1
                assert owners == 1
                await asyncio.sleep(0)
                owners -= 1
                turns.append(number)

        await asyncio.gather(*(compete(number) for number in range(5)))
        assert sorted(turns) == [0, 1, 2, 3, 4]

    async def test_an_owner_that_is_evicted_is_replaced_although_it_still_runs(
        self, ownership: Ownership
    ) -> None:
        assert await ownership.incumbent(ONE) is None
        async with ownership.acquire(ONE, "hangs", 0):
            incumbent = await ownership.incumbent(ONE)
            assert incumbent is not None
            await ownership.evict(ONE, incumbent)
            async with ownership.acquire(ONE, "next", PATIENT_MS):
                assert await ownership.incumbent(ONE) != incumbent
                with pytest.raises(MailboxOwned, match="next"):
                    async with ownership.acquire(ONE, "third", 0):
                        pytest.fail("owned twice")

    async def test_the_next_owner_is_not_evicted_in_place_of_the_one_before(
        self, ownership: Ownership
    ) -> None:
        async with ownership.acquire(ONE, "first", 0):
            incumbent = await ownership.incumbent(ONE)
        assert incumbent is not None
        async with ownership.acquire(ONE, "second", PATIENT_MS):
            await ownership.evict(ONE, incumbent)
            with pytest.raises(MailboxOwned, match="second"):
                async with ownership.acquire(ONE, "third", 0):
                    pytest.fail("owned twice")

    async def test_an_owner_that_was_evicted_leaves_the_next_one_in_place(self, ownership: Ownership) -> None:
        next_ = ownership.acquire(ONE, "next", PATIENT_MS)
        async with ownership.acquire(ONE, "hangs", 0):
            await ownership.evict(ONE, await ownership.incumbent(ONE) or "")
            await next_.__aenter__()
        with pytest.raises(MailboxOwned, match="next"):
            async with ownership.acquire(ONE, "third", 0):
                pytest.fail("owned twice")
        await next_.__aexit__(None, None, None)
