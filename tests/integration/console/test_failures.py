"""Failures of outbox, inbox and ingestion in the console: their errors, and who retries them."""

import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec
import pytest
from aiohttp import web
from nats.aio.client import Client
from redis.asyncio import Redis

from postroom import MailboxOutbox
from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.failed_work import IngestFailures, configured_failures, recorded_failures
from postroom.application.outbox.relay import OutboxSettings
from postroom.application.ports.failed_work import FailedItem, FailedKind, FailedWork, Failures, Retried
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, PoisonMessage
from tests.integration.console.conftest import access_of
from tests.integration.inbox_world import opened_world
from tests.integration.ingest_world import DEAD, ingest, namespace, publish
from tests.integration.test_ingest_brokers import of_redis
from tests.support.access import Controlled, MemoryPlace
from tests.support.clocks import ManualClock
from tests.support.memory_stream import MemoryStream
from tests.support.messages import message
from tests.support.outboxes import CONTEXT, order_placed, record, relaying
from tests.support.servers.console import Browser, served_console

OUTBOX = f"/outboxes/failures?kind=outbox&name={CONTEXT}"
INBOX = "/outboxes/failures?kind=inbox&name=sea"
ITEM = FailedItem("1", "order_placed v1", "order o-1", 3, "2026-11-30T01:02:03+00:00", "<b>no</b>")


class RememberedWork:
    """Failures that a test states, and the retries that were asked for."""

    kind: FailedKind = "outbox"
    name = "a <i>"

    def __init__(self, items: Sequence[FailedItem] = (ITEM,)) -> None:
        self.items = items
        self.retried: list[Sequence[str] | None] = []

    async def read(self, limit: int) -> Failures:
        return Failures(self.items, is_whole=True, count=7, details=[("Capture", "slot <u>")])

    async def retry(self, ids: Sequence[str] | None) -> Retried:
        self.retried.append(ids)
        return Retried(1, "1 event will be retried.")


@asynccontextmanager
async def browser_of(place: MemoryPlace, *work: FailedWork) -> AsyncIterator[Browser]:
    async with served_console(
        place.mailbox, access=access_of(place), find_failed_work=lambda _: work
    ) as browser:
        await browser.sign_in(place.issue(principal="ops"))
        yield browser


def of_settings(**sections: Mapping[str, Any]) -> list[FailedWork]:
    return configured_failures(
        sections, lambda name, kind: msgspec.convert(sections.get(name, {}), kind, strict=False)
    )


async def test_failures_are_shown_and_those_that_are_chosen_retried_and_audited(place: MemoryPlace) -> None:
    work = RememberedWork([ITEM, ITEM._replace(id='2"', retry_at="2026-11-30T04:05:06+00:00")])
    async with browser_of(place, work) as browser:
        assert "a &lt;i&gt;" in (await browser.get("/outboxes")).text
        page = (await browser.get("/outboxes/failures?kind=outbox&name=a+%3Ci%3E")).text
        for text in ("&lt;b&gt;no&lt;/b&gt;", "slot &lt;u&gt;", ">parked<", "04:05:06", ">7<"):
            assert text in page
        fields = {"kind": "outbox", "name": "a <i>"}
        done = await browser.send(
            "/outboxes/retry", [("csrf", browser.csrf), *fields.items(), ("id", "1"), ("id", '2"')]
        )
        assert "1 event will be retried." in done.text
        await browser.post("/outboxes/retry", **fields, all="1")
        assert (await browser.post("/outboxes/retry", **fields)).status == 400
        assert (await browser.post("/outboxes/retry", kind="outbox", name="other", all="1")).status == 404
    assert work.retried == [["1", '2"'], None]
    entries = [each for each in place.audit.entries if each.criteria == ("retry_failures",)]
    assert [(each.principal, each.operation, each.target, each.matches) for each in entries[:2]] == [
        ("ops", "redrive", "outbox a <i>", 1)
    ] * 2
    assert [each.outcome for each in entries] == ["allowed", "allowed", "E_SCHEMA", "E_NOT_FOUND"]
    assert [each.target for each in place.audit.entries if each.criteria == ("list_failures",)]


@pytest.mark.parametrize(
    ("rights", "status"), [({"operations": [Right.READ_HEADERS]}, 200), ({"topics": ["orders"]}, 403)]
)
async def test_a_token_without_redrive_of_all_topics_retries_nothing(
    place: MemoryPlace, rights: dict[str, Any], status: int
) -> None:
    work = RememberedWork()
    async with browser_of(place, work) as first, Browser.another(first) as browser:
        await browser.sign_in(place.issue(**rights))
        await browser.get()
        page = await browser.get("/outboxes/failures?kind=outbox&name=a+%3Ci%3E")
        assert (page.status, "/outboxes/retry" in page.text) == (status, False)
        answer = await browser.post("/outboxes/retry", kind="outbox", name=work.name, all="1")
        assert answer.status == 403
    assert work.retried == []


async def test_what_can_not_be_retried_is_explained(place: MemoryPlace) -> None:
    work = RememberedWork()

    async def refuse(ids: Sequence[str] | None) -> Retried:
        raise InvalidRequest("Outbox event 1 still can't be published.")

    work.retry = refuse  # type: ignore[method-assign]
    async with browser_of(place, work) as browser:
        await browser.get("/outboxes")
        answer = await browser.post("/outboxes/retry", kind="outbox", name=work.name, id="1")
    assert (answer.status, "still can&#39;t be published" in answer.text) == (400, True)


async def test_events_that_were_not_published_are_retried(
    place: MemoryPlace, messaging_database: str
) -> None:
    async def refuse(subject: str, payload: bytes) -> None:
        raise InvalidRequest("the <stream> is full")

    one, two = record(messaging_database, order_placed("o-1", 1), order_placed("o-2", 1))
    settings = OutboxSettings(max_attempts=1)
    async with relaying(messaging_database, MemoryStream(refuse), settings=settings) as relay:
        await relay.relay_once()
    stream = MemoryStream()
    messaging = {"database": messaging_database, "context": CONTEXT}
    async with browser_of(place, *of_settings(messaging=messaging)) as browser:
        page = (await browser.get(OUTBOX)).text
        assert page.count("the &lt;stream&gt; is full") >= 2
        assert page.count(">parked<") == 2
        done = await browser.post("/outboxes/retry", kind="outbox", name=CONTEXT, id=str(one))
        assert "1 event will be retried." in done.text
        async with relaying(messaging_database, stream) as relay:
            await relay.relay_once()
        assert len(stream.messages) == 1
        page = (await browser.get(OUTBOX)).text
        assert str(one) not in page
        assert str(two) in page
        done = await browser.post("/outboxes/retry", kind="outbox", name=CONTEXT, all="1")
        assert "1 event will be retried." in done.text
        assert (await browser.post("/outboxes/retry", kind="outbox", name=CONTEXT, id="x")).status == 400


async def test_a_database_that_can_not_be_reached_is_said_to_be(place: MemoryPlace) -> None:
    messaging = {"database": "postgresql://nobody:secret@127.0.0.1:1/none", "context": CONTEXT}
    async with browser_of(place, *of_settings(messaging=messaging)) as browser:
        page = await browser.get(OUTBOX)
    assert page.status == 200
    assert 'role="alert"' in page.text
    assert "secret" not in page.text


async def test_dead_letters_of_an_inbox_are_delivered_to_their_handler_again(
    place: MemoryPlace, nats_url: str, messaging_database: str
) -> None:
    seen: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(await request.read())
        return web.Response(status=422 if len(seen) == 1 else 200, text="no total")

    application = web.Application()
    application.router.add_post("/handle", handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    sections: dict[str, dict[str, Any]] = {
        "messaging": {"database": messaging_database, "context": "sea"},
        "nats": {"url": nats_url},
        "inbox": {"handler": f"{url}handle", "allow": [f"{url} 127.0.0.0/8"], "signing_key": "k" * 40},
    }

    async def poison(_: object) -> None:
        raise PoisonMessage("a <wrong> total")

    try:
        async with opened_world(nats_url, messaging_database) as world:
            await world.make_streams()
            ids = [await world.publish({"n": n}, aggregate=str(n)) for n in range(2)]
            await world.work(poison)
            async with browser_of(place, *of_settings(**sections)) as browser:
                page = (await browser.get(INBOX)).text
                assert page.count("a &lt;wrong&gt; total") >= 2
                done = await browser.post("/outboxes/retry", kind="inbox", name="sea", id=ids[0])
                assert "0 processed, 0 duplicates, 1 failed (HTTP 422: no total)" in done.text
                done = await browser.post("/outboxes/retry", kind="inbox", name="sea", all="1")
                assert "2 processed" in done.text
                assert "Nothing has failed" in (await browser.get(INBOX)).text
            assert await world.dead_letters() == []
            sections["inbox"] = {}
            async with browser_of(place, *of_settings(**sections)) as browser:
                await browser.get(INBOX)
                answer = await browser.post("/outboxes/retry", kind="inbox", name="sea", all="1")
                assert (answer.status, "handler" in answer.text) == (400, True)
    finally:
        await runner.cleanup()
    assert len(seen) == 3


async def test_messages_that_the_mailbox_refused_are_sent_again(
    stored: Controlled[OwnedMailbox, ManualClock], tmp_path: Path
) -> None:
    shop, mailbox = str(tmp_path / "shop.db"), stored.mailbox
    with closing(sqlite3.connect(shop)) as connection:
        for each in (mailbox.name, "other@local"):
            MailboxOutbox(each).record(connection, message(message_id=f"of-{each}"))
        connection.execute("UPDATE outbox_messages SET error = 'the <topic> is full'")
        connection.commit()
    work = recorded_failures([shop, shop], mailbox.name)
    path = "/outboxes/failures?" + urlencode({"kind": "recorded", "name": work[0].name})
    access = access_of(stored)
    async with served_console(mailbox, access=access, find_failed_work=lambda _: work) as browser:
        await browser.sign_in(stored.issue())
        page = (await browser.get(path)).text
        assert "the &lt;topic&gt; is full" in page
        assert "of-other" not in page
        done = await browser.post("/outboxes/retry", kind="recorded", name=work[0].name, all="1")
        assert "1 message will be sent again." in done.text
        assert "Nothing has failed" in done.text
    with closing(sqlite3.connect(shop)) as connection:
        rows = connection.execute("SELECT mailbox, error IS NULL FROM outbox_messages").fetchall()
    assert sorted(rows) == sorted([(mailbox.name, 1), ("other@local", 0)])


async def test_messages_that_could_not_be_stored_are_published_again(
    place: MemoryPlace, nats_url: str, client: Client, sqlite: str
) -> None:
    await publish(client, b"junk")
    what = namespace(nats_url, sqlite, dead_letter_subject=DEAD)
    await ingest(what)
    async with browser_of(place, IngestFailures("acme", what.source)) as browser:
        page = (await browser.get("/outboxes/failures?kind=ingest&name=acme")).text
        assert "not a PrismEnvelope" in page
        assert "<dt>Not done</dt><dd>0</dd>" in page
        done = await browser.post("/outboxes/retry", kind="ingest", name="acme", all="1")
        assert "1 message published at the original subject again." in done.text
        assert "Nothing has failed" in done.text
        assert "<dt>Not done</dt><dd>1</dd>" in done.text  # it waits for the ingester
        assert (await browser.post("/outboxes/retry", kind="ingest", name="acme", id="77")).status == 404
    sizes = [(await client.jetstream().stream_info(each)).state.messages for each in ("DEAD", "EVENTS")]
    assert sizes == [0, 2]


async def test_messages_of_redis_that_could_not_be_stored_are_published_again(
    place: MemoryPlace, redis_url: str, sqlite: str
) -> None:
    what, stream, dead = of_redis(redis_url, sqlite)
    redis: Any
    async with Redis.from_url(redis_url) as redis:
        for _ in range(2):
            await redis.xadd(stream, {"data": b"junk", "trace": "abc"})
        await ingest(what)
        (first, _), _ = await redis.xrange(dead)
        async with browser_of(place, IngestFailures("acme", what.source)) as browser:
            page = (await browser.get("/outboxes/failures?kind=ingest&name=acme")).text
            assert page.count("not a PrismEnvelope") == 4  # each also as a title
            for id_, status in (("77", 400), ("1-1", 404)):
                answer = await browser.post("/outboxes/retry", kind="ingest", name="acme", id=id_)
                assert answer.status == status, id_
            done = await browser.post("/outboxes/retry", kind="ingest", name="acme", id=first.decode())
            assert "1 message published at the original subject again." in done.text
            assert await redis.xlen(dead) == 1
            done = await browser.post("/outboxes/retry", kind="ingest", name="acme", all="1")
            assert "Nothing has failed" in done.text
        assert await redis.xlen(dead) == 0
        assert [fields for _, fields in await redis.xrange(stream)] == [
            {b"data": b"junk", b"trace": b"abc"}
        ] * 4
