"""The console over a long history: latency of its pages, memory, and exports beside sends.

`make bench NAMES=console`, or `python -m tests.benchmarks console.sqlite --messages 1000000 --keep FOLDER`.
"""

import asyncio
import re
import resource
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles

from aiohttp import ClientSession, ClientTimeout, CookieJar

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import read_projections
from postroom.application.messages import NewMessage
from postroom.domain.errors import NotFound
from postroom.domain.search import EventFilter
from tests.benchmarks.figures import Figures
from tests.benchmarks.options import Database, Options
from tests.benchmarks.throughput import LIMITS, POLICY
from tests.support.browser import chromium
from tests.support.servers.console import Browser, served_console
from tests.support.waiting import until

PAGES: dict[str, Sequence[str]] = {
    "overview": ("/",),
    "search": (
        "/search",
        "/search?topics=bench.t1",
        "/search?topics=bench.t1*&statuses=acked",
        "/search?statuses=dead",
        "/search?statuses=acked&topics=bench.failing",
        "/search?principals=user-7",
        "/search?header=region%3Dr3",
        "/search?header=region%3Dr3&topics=bench.t3",
        "/search?match=user-7",
        "/search?match=r3+bench.t3",
        "/search?correlation_id=request-77",
    ),
    "text": ("/search?text=user-77", "/search?text=nowhere+to+be"),
    "suggestions": (
        "/search/suggestions/topic?topics=bench.t1",
        "/search/suggestions/principal?principals=user-1",
        "/search/suggestions/header?header=r",
    ),
    "log": (
        "/log",
        "/log?event=MessageDeadLettered",
        "/log?topic=bench.failing",
        "/log?topic=nothing",
        "/log?position=5000",
        "/log/commits",
        "/log/commits/5000",
        "/log/events/5000",
    ),
    "audit": ("/audit", "/audit?principal=nobody"),
    "access": ("/access",),
    "dead-letters": (
        "/dead-letters",
        "/dead-letters?by=reason&order=largest",
        "/dead-letters?topics=bench.*&text=be",
        "/dead-letters/letters",
        "/dead-letters/letters?topics=bench.failing",
    ),
    "redrives": ("/redrives", "/redrives/new?topics=bench.failing"),
    "verify": ("/log/verify", "/log/verify?from=5000"),
    "what-if": ("/what-if", "/what-if?max_attempts=3", "/what-if?max_attempts=3&topic=bench.flaky"),
}
"""Paths of each page, whose figures are those of all of them; other pages add theirs."""
REPEATS = 15
WARM_UPS = 2
GOAL_MS = 200.0
LOADS = 1_000
SENDS = 4_000
EXPORT_GOAL_MB = 10.0
BATCH = 20
PAIRS = 5
TOPICS = (10, 200, 10_000)
SENT_AT_ONCE, SENT_EVERY_SECONDS = 10, 0.2
"""Traffic beside the overview: fifty messages a second."""
SETTLE_SECONDS, FIRST_SECONDS, LIVE_SECONDS = 12.0, 1.0, 30.0


def measurements(options: Options) -> dict[str, Callable[[Figures, Path, int], None]]:
    """Return the measurements of the console on each database."""

    def measure_on(database: Database) -> Callable[[Figures, Path, int], None]:
        def measure(figures: Figures, folder: Path, messages: int) -> None:
            from tests.benchmarks.spark import open_store  # writes logs in the format of this code

            with open_store(database, messages, options, figures, folder) as (store, _):
                _build(store)
                asyncio.run(_measure(figures, database, store))

        return measure

    return {
        "console.sqlite": measure_on("sqlite"),
        "console.postgres": measure_on("postgres"),
        "console.topics": lambda figures, folder, messages: _measure_topics(figures),
        "console.tail": lambda figures, folder, messages: asyncio.run(_measure_tails(figures, folder)),
    }


def _measure_topics(figures: Figures) -> None:
    """Measure the overview of a mailbox with few and with many topics."""
    for count in TOPICS:
        if figures.wants(f"console.topics.{count}"):
            asyncio.run(_measure_overview(figures, count))


async def _measure_overview(figures: Figures, topics: int) -> None:
    """Open the overview, and keep it open while messages are sent.

    The first time is that of a server that has counted nothing, the second that of one with counts. Bytes
    are those on the wire to a browser that accepts gzip; the share of a core is that of the browser's page.
    """
    name = f"console.topics.{topics}"
    async with (
        open_mailbox("memory:", default_policy=POLICY, limits=LIMITS) as mailbox,
        served_console(mailbox, measure=mailbox.measure) as browser,
        ClientSession(cookie_jar=CookieJar(unsafe=True), auto_decompress=False) as raw,
    ):
        for start in range(0, topics, BATCH):
            batch = range(start, min(topics, start + BATCH))
            await mailbox.send_batch(
                [NewMessage(topic=f"team-{each % 7}.topic-{each:05}", payload=b"{}") for each in batch]
            )
        page = b""
        for figure, goal in (("first", 300.0), ("next", None)):
            started, worked = time.perf_counter(), time.process_time()
            async with raw.get(f"{browser.url}/") as response:
                page = await response.read()
            figures.add(f"{name}.{figure}", (time.perf_counter() - started) * 1_000, "ms", goal)
            figures.add(f"{name}.{figure}.cpu", (time.process_time() - worked) * 1_000, "ms")
        figures.add(f"{name}.page", len(page) / 1e3, "KB", 100.0)
        traffic = asyncio.create_task(_send_forever(mailbox, topics))
        await asyncio.sleep(SETTLE_SECONDS)
        received, worked = await _count_live(raw, f"{browser.url}/live"), 0.0
        figures.add(f"{name}.live", received / LIVE_SECONDS / 1e3, "KB per s", 5.0)
        worked = await asyncio.to_thread(_browser_seconds, f"{browser.url}/")
        figures.add(f"{name}.browser", worked / LIVE_SECONDS * 100, "% of a core", 5.0)
        traffic.cancel()


async def _send_forever(mailbox: OwnedMailbox, topics: int) -> None:
    """Send some messages a second to topics in turn, and ack them."""
    number = 0
    while True:
        sent = [
            f"team-{each % 7}.topic-{each:05}"
            for each in ((number + step) % topics for step in range(SENT_AT_ONCE))
        ]
        number += SENT_AT_ONCE
        await mailbox.send_batch([NewMessage(topic=each, payload=b"{}") for each in sent])
        for topic in sent:
            received = await mailbox.receive_messages(topic, max_messages=1)
            await mailbox.ack_messages([each.receipt for each in received])
        await asyncio.sleep(SENT_EVERY_SECONDS)


async def _count_live(client: ClientSession, url: str) -> int:
    """Return the bytes of the live part, after the first event, which is all of it."""
    size, counted_from = 0, 0.0
    async with client.get(url, timeout=ClientTimeout(None)) as response:
        async for data in response.content.iter_any():
            now = time.monotonic()
            counted_from = counted_from or now
            if now >= counted_from + LIVE_SECONDS:
                break
            size += len(data) if now > counted_from + FIRST_SECONDS else 0
    return size


TAILS = {
    "messages": ("",),
    "rare": ("topics=rare&show=events",),
    "events": ("show=events",),
    "criteria": ("topics=busy&principals=user-7&show=events",),
    "many": ("show=events",) * 8,
}
"""Queries of live tails that are open at a time."""
EVENTS_A_SECOND, EVENTS_AT_ONCE, TAIL_SECONDS = 20_000, 750, 15.0


async def _measure_tails(figures: Figures, folder: Path) -> None:
    """Follow a log to which 20,000 events a second are written, by tails of different criteria.

    Bytes are those on the wire of one tail to a browser that accepts gzip, and before compression; the share
    of a core is what the process takes beyond what as many events take without a tail.
    """
    store = str(folder / "tail.db")
    async with (
        open_mailbox(store, default_policy=POLICY, limits=LIMITS) as mailbox,
        served_console(mailbox, store=store) as browser,
    ):
        await browser.get("/")
        await _traffic(mailbox)  # for the caches
        seconds, events = await _traffic(mailbox)
        alone = seconds / events
        figures.add("console.tail.rate", events / TAIL_SECONDS, "events per s")
        for name, queries in TAILS.items():
            if not figures.wants(f"console.tail.{name}"):
                continue
            async with ClientSession(cookie_jar=CookieJar(unsafe=True), auto_decompress=False) as client:
                await client.get(browser.url + "/")  # for a session
                opened = [
                    asyncio.create_task(_read_tail(client, f"{browser.url}/tail/live?{each}"))
                    for each in queries
                ]
                await asyncio.sleep(FIRST_SECONDS)
                seconds, events = await _traffic(mailbox)
                for each in opened:
                    each.cancel()
                sizes = await asyncio.gather(*opened)
            figures.add(f"console.tail.{name}.wire", sizes[0][0] / TAIL_SECONDS / 1e3, "KB per s", 10.0)
            figures.add(f"console.tail.{name}.text", sizes[0][1] / TAIL_SECONDS / 1e3, "KB per s", 60.0)
            share = (seconds - alone * events) / TAIL_SECONDS
            figures.add(f"console.tail.{name}.cpu", share * 100, "% of a core", 10.0)


async def _traffic(mailbox: OwnedMailbox) -> tuple[float, float]:
    """Send, receive and ack messages for a while; return the processor time in s and the number of events."""
    worked, begun, events = time.process_time(), time.monotonic(), 0
    messages = [
        NewMessage(topic="busy", payload=b"{}", principal=f"user-{n}") for n in range(EVENTS_AT_ONCE // 3)
    ]
    while (elapsed := time.monotonic() - begun) < TAIL_SECONDS:
        if events > elapsed * EVENTS_A_SECOND:
            await asyncio.sleep(events / EVENTS_A_SECOND - elapsed)
            continue
        await mailbox.send_batch(messages)
        received = await mailbox.receive_messages("busy", max_messages=len(messages))
        await mailbox.ack_messages([each.receipt for each in received])
        events += 3 * len(received)
    return time.process_time() - worked, events


async def _read_tail(client: ClientSession, url: str) -> tuple[int, int]:
    """Return the bytes of a tail on the wire, and before they were compressed, until it is cancelled."""
    wire, text, decompressor = 0, 0, zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        async with client.get(url, timeout=ClientTimeout(None)) as response:
            async for data in response.content.iter_any():
                wire, text = wire + len(data), text + len(decompressor.decompress(data))
    except asyncio.CancelledError:
        pass
    return wire, text


def _browser_seconds(url: str) -> float:
    """Return the processor time of a page of Chromium that is open for a while."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(url)
        page.get_by_text("Live", exact=True).wait_for()
        page.wait_for_timeout(FIRST_SECONDS * 1_000)
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")

        def task_seconds() -> float:
            metrics = session.send("Performance.getMetrics")["metrics"]
            return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

        before = task_seconds()
        page.wait_for_timeout(LIVE_SECONDS * 1_000)
        return task_seconds() - before


def _build(store: str) -> None:
    """Build the read models, unless an earlier run did."""
    try:
        with read_projections(store) as projections:
            projections.search_messages(EventFilter(limit=1))
    except NotFound:
        rebuild_projections(store, lambda _: None)


async def _measure(figures: Figures, database: Database, store: str) -> None:
    async with (
        open_mailbox(
            store, default_policy=POLICY, limits=LIMITS, durability="relaxed", accept_clock=True
        ) as mailbox,
        served_console(mailbox, store=store) as browser,
    ):
        pages = {**PAGES, "message": await _message_paths(browser)}
        for page, paths in pages.items():
            if not figures.wants(f"console.{database}.{page}"):
                continue
            seconds, processor, slowest = [], [], ("", 0.0)
            for path in paths:
                own, work = await _latencies(browser, path)
                seconds += own
                processor += work
                slowest = max(slowest, (path, median(work)), key=lambda each: each[1])
            name = f"console.{database}.{page}"
            figures.progress(
                f"{name}: {slowest[0]} takes the most, {slowest[1] * 1_000:.0f} ms of a processor"
            )
            figures.add(f"{name}.p50", median(seconds) * 1_000, "ms")
            # The server of the benchmark lacks pg_trgm: a rare text is found by a look at all texts.
            goal = None if name == "console.postgres.text" else GOAL_MS
            figures.add(f"{name}.p95", quantiles(seconds, n=20)[18] * 1_000, "ms", goal)
            figures.add(f"{name}.cpu.p95", quantiles(processor, n=20)[18] * 1_000, "ms")
        if figures.wants(f"console.{database}.memory"):
            await _measure_memory(figures, database, browser)
        if figures.wants(f"console.{database}.export"):
            await _measure_export(figures, database, mailbox, browser)


async def _message_paths(browser: Browser) -> list[str]:
    """Return the paths of the newest and the oldest messages, settled ones and dead letters."""
    paths = []
    for query in ("order=newest", "order=oldest", "statuses=dead", "statuses=acked&order=oldest"):
        page = await browser.get(f"/search?limit=25&{query}")
        paths += re.findall(r'href="/console(/messages[/?][^"]+)"', page.text)[:2]
    assert len(paths) == 8, paths
    return paths


async def _latencies(browser: Browser, path: str) -> tuple[list[float], list[float]]:
    """Return how long a page took, and the processor time of server and client for it."""
    seconds, processor = [], []
    for number in range(WARM_UPS + REPEATS):
        started, worked = time.perf_counter(), time.process_time()
        page = await browser.get(path)
        took, work = time.perf_counter() - started, time.process_time() - worked
        assert page.status == 200, (path, page.status)
        if number >= WARM_UPS:
            seconds.append(took)
            processor.append(work)
    return seconds, processor


async def _measure_memory(figures: Figures, database: Database, browser: Browser) -> None:
    """Load pages, and tell by how much the memory of the process grew."""
    paths = [path for paths in PAGES.values() for path in paths]

    async def load(count: int) -> None:
        for number in range(count):
            await browser.get(paths[number % len(paths)])

    await load(LOADS // 5)
    before = _resident_bytes()
    await load(LOADS)
    figures.add(f"console.{database}.memory.growth", (_resident_bytes() - before) / 1e6, "MB", 20.0)


async def _measure_export(
    figures: Figures, database: Database, mailbox: OwnedMailbox, browser: Browser
) -> None:
    """Export all messages with payloads, and send beside it; sends by themselves take turns with that.

    The time of sends is that of a clock, and holds on a quiet machine with two processors only.
    """
    url = browser.url + "/search/export?format={}&payload=1"
    for format_ in ("json", "csv", "parquet"):
        size, started, before = 0, time.perf_counter(), _children_seconds()
        async with browser.client.get(url.format(format_)) as response:
            async for data in response.content.iter_any():
                size += len(data)
        seconds = time.perf_counter() - started
        processor = await _new_children_seconds(before)
        name = f"console.{database}.export.{format_}"
        figures.add(name, size / 1e6 / seconds, "MB/s", EXPORT_GOAL_MB)
        figures.add(f"{name}.cpu", size / 1e6 / processor, "MB/s")
    alone, beside = [], []
    for _ in range(PAIRS):
        alone.append(await _send_seconds(mailbox))
        async with browser.client.get(url.format("json")) as response:
            reading = asyncio.create_task(_discard(response.content))
            beside.append(await _send_seconds(mailbox))
            reading.cancel()
    ratio = median(beside) / median(alone)
    figures.add(f"console.{database}.export.sends", ratio, "x", 1.1)


async def _discard(content: object) -> None:
    async for _ in content.iter_any():  # type: ignore[attr-defined] # of aiohttp
        pass


async def _send_seconds(mailbox: OwnedMailbox) -> float:
    """Return the wall-clock seconds of some sends."""
    started = time.perf_counter()
    for start in range(0, SENDS, BATCH):
        batch = [NewMessage(topic="bench.sent", payload=bytes(200)) for _ in range(start, start + BATCH)]
        await mailbox.send_batch(batch)
    return time.perf_counter() - started


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


async def _new_children_seconds(before: float) -> float:
    """Return the processor time of a process that has ended, when it has been waited for."""
    await until(lambda: _children_seconds() > before)
    return _children_seconds() - before


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
