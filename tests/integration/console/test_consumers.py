"""Consumers in the console."""

import asyncio

import pytest

from postroom.adapters.console.pages import consumers
from postroom.application.worker_reports import HandlerState, WorkerState
from tests.support.access import MemoryPlace
from tests.support.messages import message
from tests.support.servers.console import Browser
from tests.support.waiting import until_answer

ID = "0199d3a0-0000-4000-8000-000000000000"


async def test_consumers_are_listed_with_host_process_and_errors(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    assert "No consumers" in (await browser.get("/consumers")).text
    await place.mailbox.send_batch([message()] * 2)
    first, *_ = await place.mailbox.receive_messages("orders", consumer="shop/ship@host-1:4711")
    await first.nack(reason="<i>broken</i>")
    await place.mailbox.receive_messages("payments", consumer="other")
    text = (await browser.get("/consumers")).text
    for expected in (">shop/ship<", ", process 4711", "&lt;i&gt;broken&lt;/i&gt;", ">other<"):
        assert expected in text
    assert 'class="stale"' not in text
    found = (await browser.get("/consumers?text=PAYM")).text
    assert ">other<" in found
    assert "host-1" not in found
    assert "No consumer matches" in (await browser.get("/consumers?text=nobody")).text
    by_name = (await browser.get("/consumers?sort=name")).text
    assert by_name.index(">other<") < by_name.index(">shop/ship<")
    assert (await browser.get("/consumers?sort=x")).status == 400


async def test_one_without_deliveries_for_long_is_stale_unless_it_waits(
    place: MemoryPlace, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "STALE_US", -1 << 60)  # log time is far ahead of the console's clock
    await browser.sign_in(place.issue())
    (received,) = await place.mailbox.receive_messages("orders", consumer="one")
    await received.ack()
    waiting = asyncio.create_task(
        place.mailbox.receive_messages("orders", consumer="patient", wait_ms=60_000)
    )

    async def is_listed() -> bool:
        return "patient" in (await browser.get("/consumers")).text

    await until_answer(is_listed)
    assert (await browser.get("/consumers")).text.count('class="stale"') == 1
    await place.mailbox.send_message(message())
    await waiting


async def test_workers_are_listed_with_what_they_do_and_one_has_a_page_of_its_handlers(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    consumer = "<b>shop/ship@host-1:7"
    (received,) = await place.mailbox.receive_messages("orders", consumer=consumer)
    await received.nack(reason="<i>broken</i>")
    handlers = (
        HandlerState("orders", "ship", consumer, 4, 3, 1_234, 5),
        HandlerState("mail.*", "post", "<b>shop/post@host-1:7", 2, 1, 6, 0),
    )
    worker = WorkerState("<b>shop", "host-1", 7, "2026.11<u>", "0.1.0", 90_000, handlers)
    await place.mailbox.report_worker(ID, worker)
    page = (await browser.get("/consumers")).text
    for text in ("&lt;b&gt;shop", "host-1, process 7", "2026.11&lt;u&gt;", "Postroom 0.1.0"):
        assert text in page
    for text in (">4 of 6<", ">1,240<", ">5<", "&lt;i&gt;broken&lt;/i&gt;"):
        assert text in page
    assert "silent" not in page.partition("</table>")[0].partition("<tbody>")[2]
    assert "&lt;b&gt;shop" not in (await browser.get("/consumers?text=nobody")).text
    assert "2026.11" in (await browser.get("/consumers?text=MAIL.")).text
    shown = (await browser.get(f"/consumers/worker?id={ID}")).text
    for text in (">3 of 4<", ">1 of 2<", ">1,234<", "mail.*", "&lt;i&gt;broken", "/topics/show?name=orders"):
        assert text in shown
    assert (await browser.get(f"/consumers/worker?id={ID}&principal=mallory")).status == 404
    await place.mailbox.report_worker(ID, worker, ended=True)
    assert (await browser.get(f"/consumers/worker?id={ID}")).status == 404


async def test_a_silent_worker_fades(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    await place.mailbox.report_worker(ID, WorkerState("shop", "host-1", 7, "", "", 0))
    await place.clock.advance(31)
    for path in ("/consumers", f"/consumers/worker?id={ID}"):
        page = (await browser.get(path)).text
        assert ">stale<" in page
        assert "silent for 31" in page


async def test_thousands_of_workers_are_divided_into_pages(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    for number in range(5_000):
        id_ = f"0199d3a0-0000-4000-8000-{number:012}"
        await place.mailbox.report_worker(id_, WorkerState("shop", "host-1", number, "", "", 0))
    first = (await browser.get("/consumers?text=shop")).text
    assert "4,000" in first
    assert "Page 1 of 80" in first
    last = (await browser.get("/consumers?text=shop&workers=80")).text
    assert "process 4999" in last
    assert "workers=79" in last
    assert len(first) < 200_000


async def test_a_token_of_some_topics_sees_workers_with_handlers_of_these(
    place: MemoryPlace, browser: Browser
) -> None:
    for number, topic in enumerate(("orders", "secret")):
        worker = WorkerState(f"of-{topic}", "host-1", 7, "", "", 0, (HandlerState(topic, "ship", "", 1),))
        await place.mailbox.report_worker(ID[:-1] + str(number), worker)
    await browser.sign_in(place.issue(topics=["orders"]))
    page = (await browser.get("/consumers")).text
    assert "of-orders" in page
    assert "secret" not in page
    assert (await browser.get(f"/consumers/worker?id={ID[:-1]}1")).status == 404
