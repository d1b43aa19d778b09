"""A drill of ordered workers: `python -m tests.integration.ordered_drill EVENTS WORKERS [SEED] [by-type]`.

Worker processes handle events of 500 aggregates while they are killed, paused for up to 5 s (their leases
end after 2 s), stopped and replaced. Handlers fail now and then, before or after their transaction, and
refuse some events for ever. Each effect is a row, written in the transaction of the inbox's middleware; so
the rows of an aggregate have the order in which its events were handled. With `by-type`, events have
different types, each with a handler of its own, except those that become dead letters: their type has none.
Ends with status 1 if a row is missing, there twice, out of order, or from another handler.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import msgspec
import psycopg
from psycopg_pool import AsyncConnectionPool

from postroom.adapters.compose.inbox import MessagingSettings, NatsSettings, open_worker
from postroom.adapters.postgres.messaging.middleware import current_transaction, inbox, pipeline, transaction
from postroom.adapters.postgres.migrate import migrate
from postroom.application.inbox.delivery import EventHandlers
from postroom.application.ports.inbox import HandlerRequest
from postroom.domain.errors import PoisonMessage
from tests.integration.inbox_world import CONSUMER, SOON, Handler, World, opened_world
from tests.support.fork_server import popen
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_folder
from tests.support.servers.process import pause

FAILURES = 0.03
DRILL_SECONDS = 3_000
PAUSE_SECONDS = 5.0
SETTINGS = msgspec.structs.replace(SOON, ordered=True, lease_ms=2_000, backoff_max_ms=200, concurrency=20)
READER = msgspec.structs.replace(CONSUMER, max_deliver=1_000, ack_wait_ms=3_000, max_ack_pending=1_000)
TABLE = """
CREATE TABLE effects (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    aggregate int NOT NULL, n int NOT NULL, handler text NOT NULL
)"""
TYPES = {"order_placed": "order_placed", "order_paid": "order_*", "invoice_sent": "*_sent"}
"""Types of events in turn, and the key of the handler of each."""
UNHANDLED = "refund_made"


class Plan(NamedTuple):
    """What happens in a drill.

    Arguments:
        disturbances: how often a worker is killed, paused or stopped.
        dead_every: every so many events, one can't be handled.
        handler_ms: duration of a call.
    """

    events: int
    workers: int
    seed: int = 1
    by_type: bool = False
    disturbances: int = 50
    aggregates: int = 500
    dead_every: int = 997
    handler_ms: int = 0

    def is_dead(self, event: int) -> bool:
        """Return whether an event can't be handled."""
        return event % self.dead_every == self.dead_every - 1

    def type_of(self, event: int) -> str:
        """Return the type of an event."""
        if self.by_type and self.is_dead(event):
            return UNHANDLED
        return [*TYPES][event // self.aggregates % len(TYPES)]

    def handler_of(self, event: int) -> str:
        """Return the key of the handler of an event."""
        return TYPES[self.type_of(event)] if self.by_type else "*"


async def work(nats_url: str, database: str, by_type: str, handler_ms: str) -> None:
    """Be a worker until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    dice = random.Random(os.getpid())

    def handler(key: str) -> Handler:
        async def take_effect(request: HandlerRequest) -> None:
            aggregate, n, is_poison = request.payload
            await asyncio.sleep(int(handler_ms) / 1_000)
            if is_poison:
                raise PoisonMessage("no total")
            await current_transaction().execute(
                "INSERT INTO effects (aggregate, n, handler) VALUES (%s, %s, %s)", (aggregate, n, key)
            )
            if dice.random() < FAILURES:
                raise RuntimeError("down")

        handle = pipeline(transaction(pool), inbox(), take_effect)

        async def fail_now_and_then(request: HandlerRequest) -> None:
            await handle(request)
            if dice.random() < FAILURES:
                raise RuntimeError("the response was lost")

        return fail_now_and_then

    async with AsyncConnectionPool(database, min_size=1, max_size=10) as pool:
        handlers = EventHandlers()
        for key in TYPES.values() if by_type else ("*",):
            handlers.on(key)(handler(key))
        settings, nats = MessagingSettings(database, "sea"), NatsSettings(nats_url)
        async with open_worker(settings, nats, READER, SETTINGS, handler=handlers) as worker:
            await worker.run(stop)


class Crew:
    """Worker processes, and what happens to them.

    Arguments:
        count: how many there are at a time.
    """

    def __init__(self, arguments: tuple[str, ...], count: int, dice: random.Random) -> None:
        self._arguments = arguments
        self._count = count
        self._dice = dice
        self._processes: list[subprocess.Popen[bytes]] = []
        self.happened: Counter[str] = Counter()

    def fill(self) -> None:
        """Replace the workers that ended."""
        self._processes = [each for each in self._processes if each.poll() is None]
        while len(self._processes) < self._count:
            command = [sys.executable, "-m", "tests.integration.ordered_drill", "work", *self._arguments]
            self._processes.append(popen(command))

    async def disturb(self) -> None:
        """Kill, pause or stop a worker."""
        process = self._dice.choice(self._processes)
        what = self._dice.choice(("kill", "pause", "pause", "stop"))
        self.happened[what] += 1
        if what == "pause":
            pause(process.pid)
            await asyncio.sleep(self._dice.uniform(0.1, PAUSE_SECONDS))
            process.send_signal(signal.SIGCONT)
        else:
            process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            await asyncio.to_thread(process.wait)
        self.fill()

    async def end(self) -> None:
        """Stop all workers."""
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(asyncio.to_thread(process.wait) for process in self._processes))


async def drill(plan: Plan, nats_url: str, database: str) -> list[str]:
    """Publish, handle and check; return what is wrong."""
    with psycopg.connect(database) as connection:
        connection.execute(TABLE)
    async with opened_world(nats_url, database) as world:
        await world.make_streams()
        await publish(world, plan)
        arguments = (nats_url, database, "by-type" if plan.by_type else "", str(plan.handler_ms))
        crew = Crew(arguments, plan.workers, random.Random(plan.seed))
        began = monotonic()
        crew.fill()
        try:
            await settle(world, plan, crew)
        finally:
            await crew.end()
        wrong = check(world, plan)
        letters = Counter(letter.reason for letter in await world.dead_letters())
    if crew.happened.total() < plan.disturbances // 2:
        wrong.append(f"the events were handled after {crew.happened.total()} disturbances")
    expected = {"unhandled" if plan.by_type else "poison": plan.events // plan.dead_every}
    if letters != expected:
        wrong.append(f"dead letters: {dict(letters)} instead of {expected}")
    print(f"{plan}: {len(wrong)} wrong; {dict(crew.happened)}; {monotonic() - began:.0f} s")
    return wrong


async def publish(world: World, plan: Plan) -> None:
    """Publish events of all aggregates in turn."""
    for first in range(0, plan.events, 200):
        await asyncio.gather(
            *(
                world.publish(
                    (event % plan.aggregates, event // plan.aggregates, plan.is_dead(event)),
                    aggregate=f"o-{event % plan.aggregates}",
                    subject=f"shop.event.{plan.type_of(event)}.v1",
                )
                for event in range(first, min(first + 200, plan.events))
            )
        )


async def settle(world: World, plan: Plan, crew: Crew) -> None:
    """Disturb the workers until all events are handled or dead letters."""
    goal = plan.events - plan.events // plan.dead_every
    disturbed = 0
    async with asyncio.timeout(DRILL_SECONDS):
        while True:
            ((count,),) = world.rows("SELECT count(*) FROM inbox_messages WHERE processed_at IS NOT NULL")
            if count >= goal:
                return
            if count * plan.disturbances // goal > disturbed:
                disturbed += 1
                print(f"{count:,}", file=sys.stderr, flush=True)
                await crew.disturb()
            await asyncio.sleep(0.2)


def check(world: World, plan: Plan) -> list[str]:
    """Return the effects that are missing, there twice, out of order, or from another handler."""
    effects: dict[int, list[tuple[int, str]]] = {aggregate: [] for aggregate in range(plan.aggregates)}
    for aggregate, n, handler in world.rows("SELECT aggregate, n, handler FROM effects ORDER BY position"):
        effects[aggregate].append((n, handler))
    wrong = []
    for aggregate, actual in effects.items():
        expected = [
            (event // plan.aggregates, plan.handler_of(event))
            for event in range(aggregate, plan.events, plan.aggregates)
            if not plan.is_dead(event)
        ]
        wrong += [
            f"aggregate {aggregate}: {one} instead of {other}"
            for one, other in zip_longest(actual, expected)
            if one != other
        ]
    return wrong


async def main(plan: Plan) -> int:
    """Run a drill on servers of its own; return the number of things that are wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder / "nats"))
        postgres = stack.enter_context(PostgresServer(stack.enter_context(postgres_folder())))
        database = postgres.create_database()
        migrate(database, "messaging")
        wrong = await drill(plan, nats.url, database)
    print(*wrong[:20], sep="\n")
    return len(wrong)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work", *arguments]:
            asyncio.run(work(*arguments))
        case [events, workers, *rest] if len(rest) <= 2:
            seed = next(map(int, rest), 1)
            sys.exit(asyncio.run(main(Plan(int(events), int(workers), seed, "by-type" in rest[1:]))) > 0)
        case _:
            sys.exit(__doc__)
