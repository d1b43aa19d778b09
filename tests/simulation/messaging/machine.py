"""Rules: what services, relays, workers, operators and the broker do, in any order, and where they crash."""

import asyncio
from collections import defaultdict
from typing import Any, ClassVar
from uuid import UUID

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom.adapters.postgres.messaging.aggregate_events import micros
from postroom.application.messaging import CODEC
from postroom.domain import inbox, outbox
from tests.simulation.messaging.crashes import POINTS, CrashAt
from tests.simulation.messaging.world import HOUR_US, Servers, World

AGGREGATES = ("a", "b", "c")
REST_ROUNDS = 40


def crashes(kind: str) -> st.SearchStrategy[CrashAt | None]:
    points = st.builds(
        CrashAt, st.sampled_from(POINTS[kind]), st.sampled_from(("before", "after")), st.integers(1, 2)
    )
    return st.none() | points


FATES = ("commits", "commits and causes another", "rolls back")
FRESH = st.lists(st.tuples(st.sampled_from(AGGREGATES), st.sampled_from(FATES)), max_size=4)
"""Transactions that record an event each just before a step, so that the step has something to do."""
OUTCOMES = st.lists(
    st.sampled_from(("well", "poison", "unavailable", "rolled_back", "answer_lost")), max_size=8
)


class MessagingMachine(RuleBasedStateMachine):
    """Whatever happens in between: each committed event takes effect once, and no other event ever does."""

    servers: ClassVar[Servers]

    @initialize()
    def begin_world(self) -> None:
        self.world = World(self.servers)
        self.committed: dict[str, list[str]] = defaultdict(list)
        self.open: dict[str, list[str]] = {}
        self.causes: set[str] = set()
        self.count = 0

    # -- business transactions ---

    @rule(aggregate=st.sampled_from(AGGREGATES), causes=st.booleans())
    def record_and_linger(self, aggregate: str, causes: bool) -> None:
        """Record an event in a transaction that takes its time."""
        self.record(aggregate, causes)

    @precondition(lambda self: self.open)
    @rule(commit=st.booleans(), data=st.data())
    def end_at_last(self, commit: bool, data: st.DataObject) -> None:
        aggregate = data.draw(st.sampled_from(sorted(self.open)))
        if commit:
            self.commit(aggregate)
        else:
            self.roll_back(aggregate)

    def place(self, fresh: list[tuple[str, str]]) -> None:
        """Record events, each in a transaction that ends at once."""
        for aggregate, fate in fresh:
            if aggregate not in self.open:
                self.record(aggregate, fate == "commits and causes another")
                if fate == "rolls back":
                    self.roll_back(aggregate)
                else:
                    self.commit(aggregate)

    def record(self, aggregate: str, causes: bool) -> None:
        if aggregate not in self.open:
            self.world.begin(aggregate)
            self.open[aggregate] = []
        self.count += 1
        event = f"{aggregate}{self.count}"
        self.world.record(aggregate, event, causes)
        self.open[aggregate].append(event)
        if causes:
            self.causes.add(event)

    def commit(self, aggregate: str) -> None:
        self.world.end(aggregate, commit=True)
        self.committed[aggregate] += self.open.pop(aggregate)

    def roll_back(self, aggregate: str) -> None:
        self.world.end(aggregate, commit=False)
        del self.open[aggregate]

    # -- relays ---

    @rule(fresh=FRESH, crash=crashes("relay"), refusals=st.sampled_from((0, 0, 1, 3)))
    def relay(self, fresh: list[tuple[str, str]], crash: CrashAt | None, refusals: int) -> None:
        self.place(fresh)
        self.world.run(self.world.relay("first", crash, refusals))

    @rule(fresh=FRESH, crash=crashes("relay"), other_crash=crashes("relay"))
    def relay_beside_another(
        self, fresh: list[tuple[str, str]], crash: CrashAt | None, other_crash: CrashAt | None
    ) -> None:
        self.place(fresh)

        async def both() -> None:
            await asyncio.gather(self.world.relay("first", crash), self.world.relay("second", other_crash))

        self.world.run(both())

    @rule(what=st.sampled_from(("let retries become due", "retry parked events", "clean the outbox")))
    def operate(self, what: str) -> None:
        self.world.clock.advance(HOUR_US // 1_000)
        if what == "retry parked events":
            self.world.run(self.world.retry_parked())
        elif what == "clean the outbox":
            self.world.run(self.world.clean_outbox())

    # -- the worker ---

    @rule(fresh=FRESH, outcomes=OUTCOMES, crash=crashes("worker"), fetches=st.sampled_from((1, 2, 1_000)))
    def consume(
        self, fresh: list[tuple[str, str]], outcomes: list[str], crash: CrashAt | None, fetches: int
    ) -> None:
        self.place(fresh)
        self.world.run(self.world.relay("first"))
        self.world.run(self.world.consume(outcomes, crash, fetches))

    @rule(fresh=FRESH, outcomes=OUTCOMES, crash=crashes("redrive"))
    def put_dead_letters_back(
        self, fresh: list[tuple[str, str]], outcomes: list[str], crash: CrashAt | None
    ) -> None:
        self.place(fresh)
        self.world.run(self.world.relay("first"))
        self.world.run(self.world.consume(["poison"] * len(fresh)))
        self.world.run(self.world.redrive(outcomes, crash))

    # -- the broker ---

    @rule(relay=st.booleans())
    def restart_the_broker(self, relay: bool) -> None:
        """Kill it and start it again, perhaps while a relay tries to publish."""
        if relay:
            self.world.run(self.world.relay_without_broker("first"))
        else:
            self.world.restart_broker()

    # -- what must hold ---

    @invariant()
    def nothing_takes_effect_twice(self) -> None:
        if hasattr(self, "world"):
            twice = self.world.rows("SELECT event FROM effects GROUP BY event HAVING count(*) > 1")
            assert twice == [], f"took effect twice: {twice}"

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            for aggregate in list(self.open):
                self.roll_back(aggregate)
            self.come_to_rest()
            self.check_effects()
            self.check_stream()
            self.check_histories()
        finally:
            self.world.close()

    def come_to_rest(self) -> None:
        """Let all that crashed come back, and everything end well from now on."""

        async def rest() -> None:
            for _ in range(REST_ROUNDS):
                self.world.clock.advance(HOUR_US // 1_000)
                await self.world.retry_parked()
                await self.world.relay("first")
                await self.world.consume()
                await self.world.redrive()
                if await self.world.is_at_rest():
                    return
            raise AssertionError("It does not come to rest.")

        self.world.run(rest())

    @property
    def expected(self) -> list[str]:
        events = [event for events in self.committed.values() for event in events]
        return sorted(events + [f"{event}'" for event in events if event in self.causes])

    def check_effects(self) -> None:
        effects = [event for (event,) in self.world.rows("SELECT event FROM effects")]
        assert sorted(effects) == self.expected

    def check_stream(self) -> None:
        on_stream = self.world.run(self.world.on_stream())
        assert sorted(each.event for each in on_stream) == self.expected
        for aggregate, events in self.committed.items():
            assert [each.event for each in on_stream if each.aggregate == aggregate] == events

    def check_histories(self) -> None:
        """Fold every history and compare it with its row."""
        for id_, *row in self.world.rows(
            "SELECT message_id, subject, received_at, processed_at, attempts, last_error, version, "
            "dead_lettered_at FROM inbox_messages"
        ):
            message = None
            for event in self._history(UUID(bytes=inbox.inbox_stream(id_, "inbox_messages"))):
                message = inbox.evolve(message, event)
            assert message is not None
            assert message.is_settled
            assert [
                message.subject,
                message.received_at,
                message.processed_at,
                message.attempts,
                message.last_error,
                message.version,
                message.dead_lettered_at,
            ] == [micros(value) if hasattr(value, "tzinfo") else value for value in row]
        for id_, *row in self.world.rows(
            "SELECT id, published_at, publish_attempts, publish_error FROM outbox_events"
        ):
            recorded = None
            for event in self._history(id_):
                recorded = outbox.evolve(recorded, event)
            assert recorded is not None
            assert recorded.status == "published"
            assert [recorded.published_at, recorded.publish_attempts, recorded.publish_error] == [
                micros(row[0]),
                *row[1:],
            ]

    def _history(self, stream: UUID) -> list[Any]:
        rows = self.world.admin.execute(
            "SELECT version, type, at, state FROM aggregate_events WHERE stream = %s ORDER BY version",
            (stream,),
        )
        return [CODEC.to_event(stream.bytes, n, type_, micros(at), state) for n, type_, at, state in rows]
