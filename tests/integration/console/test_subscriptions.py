"""Subscriptions in the console: the list, rewinds with a preview, and deletion."""

from postroom.adapters.compose.console import ConsoleSettings
from postroom.application.messages import NewMessage
from postroom.domain.capability.rights import Right
from postroom.domain.subscription import SubscriptionFilter
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.servers.console import Browser, served_console
from tests.support.waiting import until_answer


async def subscribe(place: MemoryPlace) -> None:
    """Add two subscriptions, of which one has two messages, one of them in flight."""
    filter_ = SubscriptionFilter(("orders", "refunds"), {"country": "de"})
    await place.mailbox.set_subscription("mail", filter_)
    await place.mailbox.set_subscription("audit", SubscriptionFilter(("pay*",)))
    for country in ("de", "fr", "de"):
        await place.mailbox.send_message(NewMessage(topic="orders", payload=b"x", attrs={"country": country}))
    assert await place.mailbox.receive_messages("mail", max_messages=1)
    await place.mailbox.pause_topic("audit")


async def test_the_list_shows_filters_progress_and_messages(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    assert "No subscriptions" in (await browser.get("/subscriptions")).text
    await subscribe(place)
    page = await browser.get("/subscriptions")
    for text in ("orders, refunds", "country=de", ">live<", ">paused<", "pay*", "Rewind…", "Delete…"):
        assert text in page.text
    assert 'href="/console/topics/show?name=mail"' in page.text
    assert 'href="/console/subscriptions"' in page.text  # the navigation
    assert "hx-trigger" not in page.text
    part = await browser.get("/subscriptions", headers={"HX-Request": "true"})
    assert part.text.lstrip().startswith('<div id="subscriptions">')


async def test_a_rewind_does_what_its_preview_counted(place: MemoryPlace, browser: Browser) -> None:
    await subscribe(place)
    await browser.sign_in(place.issue())
    assert "empties" in (await browser.get("/subscriptions/rewind?name=mail")).text
    preview = await browser.post("/subscriptions/preview", name="mail", start="beginning")
    assert "Rewind the subscription?" in preview.text
    assert preview.text.count("<dd>2</dd>") == 2
    changed = await browser.post("/subscriptions/preview", name="mail", start="0", change="1")
    assert 'value="0"' in changed.text
    assert [each.status for each in await place.mailbox.list_subscriptions()] == ["live", "live"]
    done = await browser.post("/subscriptions/rewind", name="mail", start="0")
    assert "mail is rewound: 2 messages removed, 2 copied again." in done.text

    async def is_live() -> bool:
        return {each.status for each in await place.mailbox.list_subscriptions()} == {"live"}

    await until_answer(is_live)
    assert [each.ready for each in await place.mailbox.list_subscriptions()] == [0, 2]


async def test_what_is_wrong_with_a_moment_is_said_and_what_was_typed_stays(
    place: MemoryPlace, browser: Browser
) -> None:
    await subscribe(place)
    await browser.sign_in(place.issue())
    await browser.get("/subscriptions")
    for start, problem in (
        ("", "The moment is missing"),
        ("soon", "is not a time"),
        ("9999999", "after the"),
    ):
        page = await browser.post("/subscriptions/preview", name="mail", start=start)
        assert (page.status, problem in page.text, f'value="{start}"' in page.text) == (400, True, True), (
            start
        )
    assert (await browser.get("/subscriptions/rewind?name=mial")).status == 404
    assert "did you mean mail" in (await browser.get("/subscriptions/delete?name=mial")).text
    assert (await browser.post("/subscriptions/rewind", name="mial", start="0")).status == 404


async def test_a_subscription_is_deleted_after_a_confirmation(place: MemoryPlace, browser: Browser) -> None:
    await subscribe(place)
    await browser.sign_in(place.issue())
    page = await browser.get("/subscriptions/delete?name=mail")
    assert "1 ready, 1 in flight and 0 dead" in page.text
    assert len(await place.mailbox.list_subscriptions()) == 2
    done = await browser.post("/subscriptions/delete", name="mail")
    assert "mail is deleted; 2 messages left in its topic." in done.text
    assert [each.name for each in await place.mailbox.list_subscriptions()] == ["audit"]


async def test_only_administrators_of_all_topics_are_offered_changes(
    place: MemoryPlace, browser: Browser
) -> None:
    await subscribe(place)
    for token in (place.issue(operations=[Right.READ_HEADERS]), place.issue(topics=["mail"])):
        await browser.sign_in(token)
        page = await browser.get("/subscriptions")
        assert ("mail" in page.text, "Rewind…" in page.text, "Delete…" in page.text) == (True, False, False)
        for action in ("rewind", "delete"):
            assert (await browser.get(f"/subscriptions/{action}?name=mail")).status == 403
            assert (await browser.post(f"/subscriptions/{action}", name="mail", start="0")).status == 403
    assert "pay*" not in page.text  # of another subscription, which the token does not cover
    settings = ConsoleSettings(read_only=True)
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as reader:
        await reader.sign_in(place.issue())
        assert "Rewind…" not in (await reader.get("/subscriptions")).text
        assert (await reader.post("/subscriptions/delete", name="mail")).status == 403
    assert len(await place.mailbox.list_subscriptions()) == 2


async def test_masked_headers_of_filters_are_hidden(place: MemoryPlace) -> None:
    await subscribe(place)
    settings = ConsoleSettings(mask_headers=("country",))
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
        page = await browser.get("/subscriptions")
        assert ("country=" in page.text, "country=de" in page.text) == (True, False)


async def test_the_page_of_a_copy_links_its_original(place: MemoryPlace, browser: Browser) -> None:
    await place.mailbox.set_subscription("mail", SubscriptionFilter(("orders",)))
    sent = await place.mailbox.send_message(NewMessage(topic="orders", payload=b"x"))
    (copy,) = await place.mailbox.receive_messages("mail")
    await browser.sign_in(place.issue())
    page = await browser.get(f"/messages/{copy.message_id}")
    assert "<dt>copy of</dt>" in page.text
    assert f'href="/console/messages/{sent.message_id}"' in page.text
    assert "Copied to subscription mail" in page.text
    assert "<dt>copy of</dt>" not in (await browser.get(f"/messages/{sent.message_id}")).text
