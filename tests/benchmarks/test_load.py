"""The load does what it says over every surface; the server runs in the loop of the test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from postroom.adapters.compose import socket_path
from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.compose.store import open_store
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from tests.benchmarks.figures import Figures
from tests.benchmarks.load.callers import (
    FULL_TOPIC,
    NO_TOKEN,
    REFUSALS,
    OpenCaller,
    open_grpc,
    open_http,
    open_local,
    open_own,
)
from tests.benchmarks.load.loops import Work, closed_loop, open_loop
from tests.benchmarks.surfaces import SURFACES, Size, measure_surface

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:0"
OPEN: dict[str, OpenCaller] = {"local": open_local, "http": open_http, "grpc": open_grpc, "own": open_own}


@asynccontextmanager
async def serving(
    store: Path, settings: HttpSettings | None = None
) -> AsyncIterator[tuple[Mailbox, dict[str, str]]]:
    """Yield a mailbox, and its addresses by surface."""
    surfaces = [open_http_surface(ADDRESS, settings or HttpSettings()), open_grpc_surface(ADDRESS)]
    async with (
        connect(str(store)) as mailbox,
        serve_mailbox(str(store), mailbox, surfaces, access=unrestricted) as (http, grpc),
    ):
        path = socket_path(open_store(str(store)), mailbox.name)
        yield mailbox, {"local": str(path), "http": http, "grpc": grpc, "own": http}


@pytest.mark.parametrize("surface", OPEN)
async def test_the_load_sends_receives_and_settles_messages(surface: str, tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store.db") as (mailbox, addresses),
        OPEN[surface](addresses[surface], "load") as caller,
    ):
        for _ in range(3):
            await caller.send()
        assert sum(shard.ready for shard in (await mailbox.get_backlog()).shards) == 3
        tokens = await caller.receive(2)
        assert len(tokens) == 2
        for token in tokens:
            await caller.ack(token)
        backlog = await mailbox.get_backlog()
        assert sum(shard.ready + shard.in_flight for shard in backlog.shards) == 1


async def test_each_request_that_is_to_be_refused_is(tmp_path: Path) -> None:
    async with serving(tmp_path / "store.db") as (mailbox, addresses):
        await mailbox.set_topic_policy(FULL_TOPIC, {"shards": 1, "shard_capacity": 1})
        await mailbox.send_message(NewMessage(FULL_TOPIC, b""))
        for kind in REFUSALS:
            token = NO_TOKEN if kind == "token" else None
            async with open_http(addresses["http"], "load", token) as caller:
                assert await caller.be_refused(kind) == kind


async def test_four_of_ten_mixed_calls_are_sends_and_two_are_receives(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store.db") as (_, addresses),
        open_local(addresses["local"], "load") as caller,
    ):
        work = Work(caller)
        await work.prepare(50)
        run = await open_loop(work.mix, rate=1_000, seconds=0.1)
    calls = {kind: len(values) for kind, values in run.latencies.items()}
    assert calls == {"send": 40, "receive": 20, "ack": 40}
    assert (run.refused, run.failures.total()) == (0, 0)


async def test_a_closed_loop_ends_when_there_is_nothing_left_to_do(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store.db") as (_, addresses),
        open_local(addresses["local"], "load") as caller,
    ):
        work = Work(caller)
        await work.send()
        run = await closed_loop(work.receive, callers=2, seconds=60)
    assert run.calls == 1
    assert len(work.tokens) == 1


async def test_calls_that_a_saturated_server_refuses_are_counted_as_refused(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "store.db", HttpSettings(max_connections=1)) as (_, addresses),
        open_http(addresses["http"], "load") as caller,
    ):
        await caller.send()  # takes the one connection
        run = await open_loop(Work(caller).send, rate=10_000, seconds=0.005)
    assert run.refused > 0
    assert run.failures.total() == 0


def test_a_surface_is_measured_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT)  # the load past saturation has processes of its own, too
    figures = Figures([], lambda _: None)
    size = Size(
        stage=0.05, open=0.05, overload=0.05, backlog=50, callers=(2,), saturating=2, processes=1, start=0.1
    )
    local = next(each for each in SURFACES if each.name == "local")
    measure_surface(figures, "local", local, str(tmp_path / "store.db"), tmp_path, size)
    values = {figure.name: figure.value for figure in figures.results}
    assert values["local.send.2"] > 0
    assert values["local.mixed.2.p50"] <= values["local.mixed.2.p99"]
    assert values["local.overload.failures"] == 0
    assert values["local.overload.memory.end"] > 10
