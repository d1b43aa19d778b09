"""A drill of ordered workers: `python -m tests.integration.ordered_drill EVENTS WORKERS [SEED]`.

Worker processes handle events of 500 aggregates while they are killed, paused for up to 5 s (their leases
end after 2 s), stopped and replaced. Handlers fail now and then, before or after their transaction, and
refuse some events for ever. Each effect is a row, written in the transaction of the inbox's middleware; so
the rows of an aggregate have the order in which its events were handled. Ends with status 1 if one is
missing, there twice, or out of order.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from time import monotonic

import msgspec
import psycopg
from psycopg_pool import AsyncConnectionPool

from postroom.adapters.compose.inbox import MessagingSettings, NatsSettings, open_worker
from postroom.adapters.memory.event_handler import FunctionEventHandler
from postroom.adapters.postgres.messaging.middleware import current_transaction, inbox, pipeline, transaction
from postroom.adapters.postgres.migrate import migrate
from postroom.application.ports.event_handler import HandlerRequest
from postroom.domain.errors import PoisonMessage
from tests.integration.inbox_world import CONSUMER, SOON, World, opened_world
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres import PostgresServer, postgres_folder

AGGREGATES = 500
POISON_EVERY = 997
FAILURES = 0.03
DISTURBANCES = 50
DRILL_SECONDS = 3_000
PAUSE_SECONDS = 5.0
SETTINGS = msgspec.structs.replace(SOON, ordered=True, lease_ms=2_000, backoff_max_ms=200, concurrency=20)
READER = msgspec.structs.replace(CONSUMER, max_deliver=1_000, ack_wait_ms=3_000, max_ack_pending=1_000)
TABLE = """
CREATE TABLE effects (
    position bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, aggregate int NOT NULL, n int NOT NULL
)"""


async def work(nats_url: str, database: str) -> None:
    """Be a worker until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    dice = random.Random(os.getpid())

    async def take_effect(request: HandlerRequest) -> None:
        aggregate, n, event = request.payload
        if event % POISON_EVERY == POISON_EVERY - 1:
            raise PoisonMessage("no total")
        await current_transaction().execute(
            "INSERT INTO effects (aggregate, n) VALUES (%s, %s)", (aggregate, n)
        )
        if dice.random() < FAILURES:
            raise RuntimeError("down")

    async with AsyncConnectionPool(database, min_size=1, max_size=10) as pool:
        handle = pipeline(transaction(pool), inbox(), take_effect)

        async def handler(request: HandlerRequest) -> None:
            await handle(request)
            if dice.random() < FAILURES:
                raise RuntimeError("the response was lost")

        async with open_worker(
            MessagingSettings(database, "sea"),
            NatsSettings(nats_url),
            READER,
            SETTINGS,
            handler=FunctionEventHandler(handler),
        ) as worker:
            await worker.run(stop)


class Crew:
    """Worker processes, and what happens to them.

    Arguments:
        count: how many there are at a time.
    """

    def __init__(self, arguments: tuple[str, str], count: int, dice: random.Random) -> None:
        self._arguments = arguments
        self._count = count
        self._dice = dice
        self._processes: list[asyncio.subprocess.Process] = []
        self.happened: Counter[str] = Counter()

    async def fill(self) -> None:
        """Replace the workers that ended."""
        self._processes = [each for each in self._processes if each.returncode is None]
        while len(self._processes) < self._count:
            self._processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable, "-m", "tests.integration.ordered_drill", "work", *self._arguments
                )
            )

    async def disturb(self) -> None:
        """Kill, pause or stop a worker."""
        process = self._dice.choice(self._processes)
        what = self._dice.choice(("kill", "pause", "pause", "stop"))
        self.happened[what] += 1
        if what == "pause":
            process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(self._dice.uniform(0.1, PAUSE_SECONDS))
            process.send_signal(signal.SIGCONT)
        else:
            process.send_signal(signal.SIGKILL if what == "kill" else signal.SIGTERM)
            await process.wait()
        await self.fill()

    async def end(self) -> None:
        """Stop all workers."""
        for process in self._processes:
            if process.returncode is None:
                process.send_signal(signal.SIGCONT)
                process.send_signal(signal.SIGTERM)
        await asyncio.gather(*(process.wait() for process in self._processes))


async def drill(events: int, workers: int, seed: int) -> int:
    """Publish, handle and check; return how many things are wrong."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nats = stack.enter_context(NatsServer(folder / "nats"))
        postgres = stack.enter_context(PostgresServer(stack.enter_context(postgres_folder())))
        database = postgres.create_database()
        migrate(database, "messaging")
        with psycopg.connect(database) as connection:
            connection.execute(TABLE)
        async with opened_world(nats.url, database) as world:
            await world.make_streams()
            await publish(world, events)
            crew = Crew((nats.url, database), workers, random.Random(seed))
            began = monotonic()
            await crew.fill()
            try:
                await settle(world, events, crew)
            finally:
                await crew.end()
            seconds = monotonic() - began
            wrong = check(world, events)
            letters = len(await world.dead_letters())
    poison = events // POISON_EVERY
    print(
        f"{events:,} events, {workers} workers, seed {seed}: {wrong} wrong; "
        f"{letters} dead letters of {poison}; {dict(crew.happened)}; {seconds:.0f} s"
    )
    return wrong + (letters != poison)


async def publish(world: World, events: int) -> None:
    """Publish events of all aggregates in turn."""
    for first in range(0, events, 200):
        await asyncio.gather(
            *(
                world.publish(
                    (event % AGGREGATES, event // AGGREGATES, event), aggregate=f"o-{event % AGGREGATES}"
                )
                for event in range(first, min(first + 200, events))
            )
        )


async def settle(world: World, events: int, crew: Crew) -> None:
    """Disturb the workers until all events are handled or dead letters."""
    goal = events - events // POISON_EVERY
    disturbed = 0
    async with asyncio.timeout(DRILL_SECONDS):
        while True:
            ((count,),) = world.rows("SELECT count(*) FROM inbox_messages WHERE processed_at IS NOT NULL")
            if count >= goal:
                return
            if count * DISTURBANCES // goal > disturbed:
                disturbed += 1
                print(f"{count:,}", file=sys.stderr, flush=True)
                await crew.disturb()
            await asyncio.sleep(0.2)


def check(world: World, events: int) -> int:
    """Return how many effects are missing, there twice, or out of order."""
    effects: dict[int, list[int]] = {aggregate: [] for aggregate in range(AGGREGATES)}
    for aggregate, n in world.rows("SELECT aggregate, n FROM effects ORDER BY position"):
        effects[aggregate].append(n)
    wrong = 0
    for aggregate, order in effects.items():
        expected = [
            event // AGGREGATES
            for event in range(aggregate, events, AGGREGATES)
            if event % POISON_EVERY != POISON_EVERY - 1
        ]
        wrong += sum(one != other for one, other in zip_longest(order, expected))
    return wrong


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["work", nats_url, database]:
            asyncio.run(work(nats_url, database))
        case [events, workers, *seed]:
            sys.exit(asyncio.run(drill(int(events), int(workers), int(*seed or ["1"]))) > 0)
        case _:
            sys.exit(__doc__)
