"""Schedules in the console: the list with last and next run, and its buttons."""

from postroom.adapters.compose.console import ConsoleSettings
from postroom.domain.schedule import ScheduleSpec
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.servers.console import Browser, served_console


async def test_the_list_shows_when_schedules_ran_and_run_next(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    assert "No schedules" in (await browser.get("/schedules")).text
    spec = ScheduleSpec("reports", "0 3 * * *", "Europe/Madrid", payload=b"secret", headers={"country": "de"})
    await place.mailbox.set_schedule("nightly", spec, from_code=True)
    await place.mailbox.set_schedule("paused", ScheduleSpec("trash", every_ms=43_200_000))
    await place.mailbox.pause_schedule("paused")
    page = await browser.get("/schedules")
    for text in ("0 3 * * * Europe/Madrid", "country=de", "every 12h", ">active<", ">paused<", "of a worker"):
        assert text in page.text
    assert "secret" not in page.text
    assert 'href="/console/schedules"' in page.text  # the navigation
    part = await browser.get("/schedules", headers={"HX-Request": "true"})
    assert part.text.lstrip().startswith('<div id="schedules"')


async def test_a_schedule_is_run_paused_resumed_and_deleted(place: MemoryPlace, browser: Browser) -> None:
    await place.mailbox.set_schedule("nightly", ScheduleSpec("reports", "0 3 * * *"))
    await browser.sign_in(place.issue())
    done = await browser.post("/schedules/run", name="nightly")
    (received,) = await place.mailbox.receive_messages("reports")
    assert f"has sent message {received.message_id}" in done.text
    listed = (await browser.get("/schedules")).text
    assert f"/messages/{received.message_id}" in listed
    assert ">in flight<" in listed
    assert "is paused" in (await browser.post("/schedules/pause", name="nightly")).text
    assert (await place.mailbox.list_schedules())[0].paused
    assert "is active" in (await browser.post("/schedules/resume", name="nightly")).text
    assert not (await place.mailbox.list_schedules())[0].paused
    assert "Delete the schedule?" in (await browser.get("/schedules/delete?name=nightly")).text
    assert "is deleted" in (await browser.post("/schedules/delete", name="nightly")).text
    assert await place.mailbox.list_schedules() == []
    assert (await browser.post("/schedules/run", name="nightly")).status == 404


async def test_without_admin_of_all_topics_there_are_no_buttons(place: MemoryPlace, browser: Browser) -> None:
    for name, topic in (("one", "orders"), ("other", "secrets")):
        await place.mailbox.set_schedule(name, ScheduleSpec(topic, "0 3 * * *"))
    await browser.sign_in(place.issue(topics=["orders"]))
    page = await browser.get("/schedules")
    assert "orders" in page.text
    assert "secrets" not in page.text
    assert "Run now" not in page.text
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as other:
        await other.sign_in(place.issue())
        assert "Run now" not in (await other.get("/schedules")).text
