"""A harness that can't go red proves nothing: each defect put into the real code must be found."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis.errors import FlakyFailure
from hypothesis.stateful import run_state_machine_as_test

from postroom.adapters.postgres.messaging import inbox, middleware, outbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresClaim
from postroom.adapters.sql.transaction import execute, execute_async
from postroom.application.inbox import dead_letter_admin, delivery, worker
from postroom.application.inbox.dead_letters import DeadLetterPublisher
from postroom.application.outbox import formats, relay
from postroom.application.outbox.events import headers_of
from postroom.application.ports.outbox import OutboxRepository, OutboxRow
from postroom.application.ports.source import SourceMessage
from postroom.domain.inbox import Acknowledge, RouteToDeadLetter
from tests.simulation.messaging.crashes import CrashAt
from tests.simulation.messaging.machine import MessagingMachine
from tests.simulation.messaging.world import Servers

Patch = pytest.MonkeyPatch
Defect = Callable[[Patch], None]
Story = Callable[[MessagingMachine], None]
SEARCHED: list[Defect] = []
TOLD: list[tuple[Defect, Story]] = []


def defect(put_in: Defect) -> Defect:
    """Have a defect searched for, as the simulation searches."""
    SEARCHED.append(put_in)
    return put_in


def defect_seen_in(story: Story) -> Callable[[Defect], Defect]:
    """Have a defect shown by some steps of the simulation, where a search would take long."""

    def note(put_in: Defect) -> Defect:
        TOLD.append((put_in, story))
        return put_in

    return note


def tell(story: Story, servers: Servers) -> None:
    MessagingMachine.servers = servers
    machine = MessagingMachine()
    machine.begin_world()
    try:
        story(machine)
    finally:
        machine.teardown()


def name(value: object) -> str:
    return getattr(value, "__name__", "").replace("<lambda>", "story")


@pytest.mark.parametrize(("put_in", "story"), TOLD, ids=name)
def test_the_simulation_sees(put_in: Defect, story: Story, servers: Servers, monkeypatch: Patch) -> None:
    tell(story, servers)
    put_in(monkeypatch)
    with pytest.raises(AssertionError):
        tell(story, servers)


@pytest.mark.extended
@pytest.mark.parametrize("put_in", SEARCHED, ids=name)
def test_the_simulation_finds(put_in: Defect, servers: Servers, monkeypatch: Patch) -> None:
    MessagingMachine.servers = servers
    put_in(monkeypatch)
    # Servers keep time by themselves: an example that failed need not fail in the same way again.
    with pytest.raises((AssertionError, FlakyFailure)):
        run_state_machine_as_test(
            MessagingMachine,
            settings=settings(
                max_examples=60,
                stateful_step_count=20,
                phases=[Phase.generate],
                derandomize=True,
                database=None,
                report_multiple_bugs=False,
                print_blob=False,
            ),
        )


@defect_seen_in(lambda it: it.relay([("a", "commits")], CrashAt("publish", "before", 1), 0))
def an_event_that_is_marked_before_it_is_published(patch: Patch) -> None:
    async def mark_first(
        self: relay.OutboxRelay, repository: OutboxRepository, partitions: Sequence[int], concurrency: int
    ) -> int:
        async with repository.claim(partitions) as claim:
            stored = await claim.find_unpublished(self._clock.wall(), 4)
            batch = relay.PublishBatch(self._publisher, self._route, self._format, lambda: True)
            batch.published = [(each, self._route.name_of(each.event)) for each in stored]
            await self._record(claim, batch)
        await relay.PublishBatch(self._publisher, self._route, self._format, lambda: True).publish(
            stored, concurrency
        )
        return len(stored)

    patch.setattr(relay.OutboxRelay, "_relay", mark_first)


@defect
def an_event_that_is_published_without_its_transaction(patch: Patch) -> None:
    """The outbox writes on a connection of its own, as a broker would be told directly."""

    def record_at_once(connection: psycopg.Connection[Any], statement: str, parameters: Any) -> Any:
        with psycopg.connect(connection.info.dsn) as own:
            return execute(own, statement, parameters)

    patch.setattr(outbox, "execute", record_at_once)


def a_slow_transaction(it: MessagingMachine) -> None:
    it.record_and_linger("a", False)
    it.relay([("b", "commits")], None, 0)
    it.commit("a")


@defect_seen_in(a_slow_transaction)
def a_cursor_that_passes_slow_transactions(patch: Patch) -> None:
    """What was recorded before the newest event seen is never looked at again (watermill#311)."""
    newest = [0]

    async def after_cursor(self: PostgresClaim, now: int, limit: int) -> list[OutboxRow]:
        found = [each for each in await find(self, now, limit) if (each.event.occurred_at or 0) > newest[0]]
        newest[0] = max((each.event.occurred_at or 0 for each in found), default=newest[0])
        return found

    find = PostgresClaim.find_unpublished
    patch.setattr(PostgresClaim, "find_unpublished", after_cursor)


@defect_seen_in(lambda it: it.relay([("a", "commits")] * 2, None, 0))
def an_aggregate_whose_newest_event_goes_first(patch: Patch) -> None:
    async def backwards(self: PostgresClaim, now: int, limit: int) -> list[OutboxRow]:
        return (await find(self, now, limit))[::-1]

    find = PostgresClaim.find_unpublished
    patch.setattr(PostgresClaim, "find_unpublished", backwards)


@defect_seen_in(lambda it: it.relay([("a", "commits")] * 2, None, 1))
def an_event_that_overtakes_a_refused_one(patch: Patch) -> None:
    """The events of an aggregate are published whether or not the one before was (MassTransit#3512)."""

    async def go_on(self: Any, stored: OutboxRow) -> bool:
        await publish_one(self, stored)
        return True

    publish_one = relay.PublishBatch._publish_one
    patch.setattr(relay.PublishBatch, "_publish_one", go_on)


@defect_seen_in(lambda it: it.relay([("a", "commits")], CrashAt("publish", "after", 1), 0))
def an_event_whose_message_id_changes_with_each_attempt(patch: Patch) -> None:
    """What is published again after a crash is stored again (MassTransit#3791)."""
    attempts = iter(range(1_000_000))

    def other_id(event: Any) -> dict[str, str]:
        return headers_of(event) | {"Nats-Msg-Id": f"00000000-0000-4000-8000-{next(attempts):012}"}

    patch.setattr(formats, "headers_of", other_id)


@defect_seen_in(lambda it: it.consume([("a", "commits")], [], CrashAt("handle", "before", 1), 1_000))
def a_message_that_is_acked_before_it_is_dealt_with(patch: Patch) -> None:
    async def ack_first(self: worker.InboxWorker, message: SourceMessage, *arguments: Any) -> Any:
        await self._source.ack([message])
        return await deliver(self, message, *arguments)

    deliver = worker.InboxWorker._deliver_in_order
    patch.setattr(worker.InboxWorker, "_deliver_in_order", ack_first)


@defect
def a_handler_without_an_inbox(patch: Patch) -> None:
    patch.setattr(middleware, "inbox", lambda **options: lambda handler: handler)


@defect_seen_in(lambda it: it.consume([("a", "commits")], ["rolled_back"], None, 1_000))
def an_inbox_outside_of_the_handlers_transaction(patch: Patch) -> None:
    """The message is noted as processed and committed before the handler's own transaction is."""

    async def note_at_once(connection: psycopg.AsyncConnection[Any], *arguments: Any) -> Any:
        async with await psycopg.AsyncConnection.connect(connection.info.dsn) as own:
            return await execute_async(own, *arguments)

    patch.setattr(middleware, "execute_async", note_at_once)


@defect
def a_dead_letter_that_is_only_logged(patch: Patch) -> None:
    """What used up its deliveries is in no queue any more (nats-server#7817)."""

    async def nowhere(self: DeadLetterPublisher, *arguments: Any) -> None: ...

    patch.setattr(DeadLetterPublisher, "publish", nowhere)


@defect_seen_in(
    lambda it: it.consume([("a", "commits")], ["poison"], CrashAt("mark_dead_lettered", "after", 1), 1_000)
)
def a_dead_letter_that_is_noted_before_it_is_published(patch: Patch) -> None:
    async def note_first(self: delivery.InboxDelivery, message: Any, known: Any, settlement: Any) -> None:
        if isinstance(settlement, RouteToDeadLetter):
            await self._inbox.mark_dead_lettered(known.message_id, "too soon", self._now(known))
            await self._publish(message, known.message_id, settlement, known.attempts)
        else:
            await note(self, message, known, settlement)

    note = delivery.InboxDelivery._record
    patch.setattr(delivery.InboxDelivery, "_record", note_first)


@defect
def a_failure_that_is_acknowledged(patch: Patch) -> None:
    patch.setattr(delivery, "settle", lambda *arguments: Acknowledge())


@defect_seen_in(lambda it: it.put_dead_letters_back([("a", "commits")], ["poison"], None))
def a_dead_letter_that_is_removed_before_it_is_dealt_with(patch: Patch) -> None:
    async def remove_first(self: dead_letter_admin.DeadLetterAdmin, letter: Any) -> Any:
        await self._queue.remove(letter.message)
        return await put_back(self, letter)

    put_back = dead_letter_admin.DeadLetterAdmin._redrive
    patch.setattr(dead_letter_admin.DeadLetterAdmin, "_redrive", remove_first)


@defect_seen_in(lambda it: it.consume([("a", "commits")], ["poison"], None, 1_000))
def a_row_that_disagrees_with_its_history(patch: Patch) -> None:
    def forgetful(*arguments: Any) -> Any:
        return msgspec.structs.replace(write(*arguments), last_error=None)

    write: Callable[..., Any] = inbox._change
    patch.setattr(inbox, "_change", forgetful)
