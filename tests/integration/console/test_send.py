"""The form that sends a message."""

from pathlib import Path

from postroom.adapters.compose.connect import connect
from postroom.adapters.compose.console import ConsoleSettings
from postroom.domain.capability.rights import Right
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace
from tests.support.servers.console import Browser, served_console
from tests.support.servers.http import PostroomServer

ID = "01890a5d-ac96-774b-bcce-b302099a8057"
FORM = {"topic": "news", "payload": '{"a": 1}', "content_type": "application/json", "new_id": ID}


NAMESPACES = """
namespaces:
  - name: acme
    pattern: mailbox
    schemas:
      payload:
        validation: disabled
        schemas:
          - {topic: news, format: json-schema, file: order.json, validation: strict}
    slots:
      message_source:
        backend: nats
        config: {url: "nats://localhost:4222", subject: orders, consumer_group: orders}
      storage:
        backend: sqlite
        config: {database_path: orders.db}
"""


async def test_a_message_is_sent_with_its_headers_key_and_delay(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue(principal="ops"))
    assert 'value="news"' in (await browser.get("/send?topic=news")).text
    headers = {"header-name-0": "region", "header-value-0": "eu"}
    done = await browser.post("/send", **FORM, **headers, sticky_key="k", delay="2h")
    assert f"Message {ID} was sent" in done.text
    detail = await place.mailbox.get_message(ID)
    assert (detail.topic, detail.status, detail.item.principal) == ("news", "delayed", "ops")
    assert detail.item.custom_headers == {"region": "eu"}
    assert detail.history[0].facts["sticky_key"] == "k"
    again = await browser.post("/send", **FORM, **headers, sticky_key="k", delay="2h")
    assert "had already been sent" in again.text
    other = await browser.post("/send", **FORM | {"payload": "{}"})
    assert "with other content, so nothing was sent" in other.text


async def test_what_was_typed_stays_when_the_owner_does_not_answer(tmp_path: Path) -> None:
    with PostroomServer(tmp_path / "owner") as owner:
        async with (
            connect(owner.address, timeout_ms=2_000) as mailbox,
            served_console(mailbox) as browser,
        ):
            await browser.get("/send")
            owner.process.pause()
            try:
                failed = await browser.post("/send", **FORM, sticky_key="typed-before")
                form = await browser.get("/send")
            finally:
                owner.process.resume()
    assert failed.status == 503
    assert 'value="typed-before"' in failed.text
    assert form.status == 200


async def test_a_payload_that_is_not_what_its_content_type_says_is_refused_unless_sent_anyway(
    place: MemoryPlace, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    await browser.get("/send")
    refused = await browser.post("/send", **FORM | {"payload": '{"a": <script>'})
    assert refused.status == 422
    assert "is not JSON" in refused.text
    assert "&lt;script&gt;" in refused.text
    assert "Nothing was sent" in refused.text
    assert [each.topic for each in await place.mailbox.list_topics()] == ["orders", "payments"]
    assert (await browser.post("/send", **FORM | {"payload": "x"}, anyway="1")).status == 200
    assert (await place.mailbox.get_message(ID)).topic == "news"
    wrong = await browser.post("/send", **FORM | {"delay": "soon", "new_id": ID[:-1] + "8"})
    assert wrong.status == 400
    assert "not a duration" in wrong.text


async def test_errors_name_fields_as_the_form_does(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    await browser.get("/send")
    for fields, expected in (
        (
            {"delay": "99999999d"},
            "The delay is 99999999d, which is longer than 36,500 days; write a shorter one.",
        ),
        (
            {"delay": "2h", "ttl_seconds": "60"},
            "&#34;Delay&#34; must be below the 60000 ms of &#34;Time to live",
        ),
        ({"ttl_seconds": "99999999999"}, "&#34;Time to live in seconds&#34; must be at most"),
    ):
        page = await browser.post("/send", **FORM | fields)
        alert = page.text.partition('role="alert">')[2].partition("<")[0]
        assert (page.status, expected in alert) == (400, True), alert
        assert "deliver_after_ms" not in page.text
    assert len(await place.mailbox.list_topics()) == 2


async def test_a_payload_is_checked_by_the_schema_of_the_namespace(
    place: MemoryPlace, tmp_path: Path
) -> None:
    (tmp_path / "order.json").write_text('{"type": "object", "required": ["total"]}')
    (tmp_path / "namespaces.yaml").write_text(NAMESPACES)
    settings = ConsoleSettings(namespaces=str(tmp_path / "namespaces.yaml"))
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        await browser.sign_in(place.issue())
        await browser.get("/send")
        refused = await browser.post("/send", **FORM)
        assert refused.status == 422
        assert "total" in refused.text
        assert (await browser.post("/send", **FORM | {"payload": '{"total": 1}'})).status == 200


async def test_code_is_shown_that_sends_the_same(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    await browser.get("/send")
    page = (await browser.post("/send", **FORM, sticky_key="k", delay="2h", code="1")).text
    for expected in ("curl", "--key=k", "--delay=7200000ms", "NewMessage(topic=&#39;news&#39;", "is valid"):
        assert expected in page
    assert ID not in page.partition("Code that sends it")[2]
    assert len(await place.mailbox.list_topics()) == 2


async def test_only_those_who_may_send_have_the_form(place: MemoryPlace, browser: Browser) -> None:
    await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
    page = await browser.get("/send")
    assert page.status == 403
    assert 'href="/console/send"' not in (await browser.get("/access")).text
    async with Browser.another(browser) as sender:
        await sender.sign_in(place.issue(operations=[Right.SEND], topics=["news"]))
        assert (await sender.get("/send")).status == 200
        assert f"Message {ID} was sent" in (await sender.post("/send", **FORM)).text
        assert (await sender.post("/send", **FORM | {"topic": "orders"})).status == 403
