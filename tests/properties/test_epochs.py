"""Owners of any leases in any order: an owner of a stale epoch never appends (RFC-049)."""

import asyncio
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.application.mailbox.engine import MailboxEngine
from postroom.domain.errors import Unavailable
from postroom.domain.mailbox.commands import SetPolicy
from postroom.domain.policy import TopicPolicy
from tests.support.clocks import ManualClock
from tests.support.stores import MAILBOX

EPOCHS = st.integers(1, 6)
STEPS = st.lists(st.tuples(st.sampled_from(["open", "append", "end", "renew"]), EPOCHS), max_size=20)


@given(STEPS)
def test_a_stale_epoch_never_appends(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_check(steps))


async def _check(steps: list[tuple[str, int]]) -> None:
    log, engines, ended, newest, written = MemoryEventLog(MAILBOX), {}, set[int](), 0, 0
    try:
        for step, epoch in steps:
            before = log.head()
            if step == "open" and epoch not in engines:
                ended.discard(epoch)
                engine = MailboxEngine(log, ManualClock(), may_append=partial(_is_held, epoch, ended))
                if await _succeeds(engine.open("test", epoch=epoch)):
                    assert epoch > newest
                    engines[epoch], newest = engine, epoch
                else:
                    assert epoch <= newest
                    assert log.head() == before
            elif step == "append" and epoch in engines:
                written += 1
                command = SetPolicy(
                    "orders", TopicPolicy(visibility_ms=1_000 + written)
                )  # never without an event
                is_done = await _succeeds(engines[epoch].submit([command]))
                assert is_done == (epoch == newest and epoch not in ended)
                if not is_done:
                    assert log.head() == before
            elif step == "end":
                ended.add(epoch)
            elif step == "renew":
                ended.discard(epoch)
        epochs = [record.epoch for record in log.read()]
        assert epochs == sorted(epochs)
    finally:
        for engine in engines.values():
            await engine.close()


async def _succeeds(work: object) -> bool:
    try:
        await work  # type: ignore[misc]
    except Unavailable:
        return False
    return True


def _is_held(epoch: int, ended: set[int]) -> bool:
    return epoch not in ended
