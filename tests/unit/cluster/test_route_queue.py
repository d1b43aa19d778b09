"""Changes of routes on their way to one proxy."""

import asyncio

from postroom.application.cluster import route_queue
from postroom.application.cluster.route_queue import PushCounts, RouteQueue
from postroom.application.ports.control_plane import RouteChange
from tests.support.clocks import ManualClock
from tests.support.route_push import RecordedPush
from tests.support.waiting import until, within

ADDRESS = "127.0.0.1:7101"


def removals(*positions: int, mailbox: str = "orders@proxy-1") -> list[RouteChange]:
    return [RouteChange(mailbox, position, None) for position in positions]


class HangingPush(RecordedPush):
    """A proxy that is paused until `resumed` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.resumed = asyncio.Event()
        self.calls = 0

    async def push(self, address: str, change: RouteChange, key: str) -> None:
        self.calls += 1
        await within(self.resumed.wait())
        await super().push(address, change, key)


def queue(push: RecordedPush) -> tuple[RouteQueue, PushCounts]:
    counts = PushCounts()
    return RouteQueue(ADDRESS, push, counts, ManualClock().uptime), counts


async def test_of_several_changes_of_a_mailbox_only_the_newest_waits() -> None:
    push = HangingPush()
    changes, counts = queue(push)
    changes.add(removals(1))
    await until(lambda: push.calls == 1)
    changes.add(removals(2, 3, 4))
    push.resumed.set()
    await until(lambda: counts.outcomes["ok"] == 2)
    assert [each.position for each in push.changes[ADDRESS]] == [1, 4]
    await changes.close()


async def test_what_is_in_a_table_that_the_proxy_is_given_is_not_pushed() -> None:
    push = HangingPush()
    changes, counts = queue(push)
    changes.add(removals(1))
    await until(lambda: push.calls == 1)
    changes.add([*removals(2, mailbox="a@p"), *removals(3, mailbox="b@p")])
    changes.table_sent(2)
    push.resumed.set()
    await until(lambda: counts.outcomes["ok"] == 2)
    assert push.mailboxes(ADDRESS) == ["orders@proxy-1", "b@p"]
    await changes.close()


async def test_a_paused_proxy_costs_a_bounded_number_of_calls_and_changes(monkeypatch) -> None:
    monkeypatch.setattr(route_queue, "PUSH_SECONDS", 0.02)
    monkeypatch.setattr(route_queue, "MAX_CHANGES", 20)
    push = HangingPush()
    changes, counts = queue(push)
    changes.add([RouteChange(f"m{n}@p", n + 1, None) for n in range(21)])
    assert counts.outcomes["dropped"] == 21
    changes.add([RouteChange(f"m{n}@p", n + 1, None) for n in range(20)])
    await until(lambda: counts.outcomes["failed"] == 20)
    push.resumed.set()
    changes.add(removals(99))
    await until(lambda: counts.outcomes["ok"] == 1)
    await changes.close()
