"""The page of a message: what it shows to whom, and that looking changes nothing."""

import gzip
import re
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from google.protobuf import source_context_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.console import ConsoleSettings, console_mount
from postroom.adapters.compose.serve import SurfaceProtection
from postroom.adapters.compose.testing import open_memory_mailbox
from postroom.domain.capability.rights import Right
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest
from postroom.domain.policy import MailboxLimits, TopicPolicy
from tests.integration.console.conftest import access_of
from tests.support.access import MemoryPlace, controlled_mailbox
from tests.support.altered_commits import alter
from tests.support.erasure import keys_of, new_erasure
from tests.support.messages import message
from tests.support.servers.console import Browser, served_console
from tests.support.stores import envelope as build
from tests.support.stores import receive_one, sqlite_place

READ_HEADERS, READ_PAYLOAD = Right.READ_HEADERS, Right.READ_PAYLOAD
RTL = "\N{RIGHT-TO-LEFT OVERRIDE}"
SCRIPT = "<script>alert(1)</script>"
NASTY_IDS = {
    "slashes": "a/b//c/",
    "percent": "100%41%2F%",
    "quotes": "\"'`<b>&amp;$(id)",
    "bidi": f"order-{RTL}-1",
    "dots": "../../..",
    "dot": ".",
    "query": "?id=x#y",
    "controls": "a\0b\nc\td\x1b[31m",
    "backslash": "\\\\host\\x",
    "long": "ü" * 255,
    "option": "--help",
}

NAMESPACES = """
namespaces:
  - name: acme
    pattern: mailbox
    schemas:
      payload:
        format: protobuf
        file: source.binpb
        schemas:
          - topic: orders
            message_name: google.protobuf.SourceContext
    slots:
      message_source:
        backend: nats
        config: {url: "nats://localhost:4222", subject: orders, consumer_group: orders}
      storage:
        backend: sqlite
        config: {database_path: orders.db}
"""


async def test_a_message_is_shown_with_headers_payload_history_and_hashes(
    place: MemoryPlace, browser: Browser
) -> None:
    sent = await place.mailbox.send_message(
        message(
            b'{"total":1.10}',
            content_type="application/json",
            correlation_id="request-7",
            causality_parent="order-6",
            principal="alice",
            attrs={"tenant": "acme"},
        )
    )
    await browser.sign_in(place.issue(principal="olga"))
    page = await browser.get(f"/messages/{sent.message_id}")
    text = unescape(page.text)
    assert page.status == 200
    for part in (
        "alice",
        "acme",
        "request-7",
        '{\n  "total": 1.10\n}',
        "Sent by alice to orders",
        "payload match",
    ):
        assert part in text
    assert 'href="/console/messages/order-6"' in page.text
    assert "correlation_id=request-7" in page.text
    assert [(each.operation, each.target) for each in place.audit.entries] == [
        ("read-payload", sent.message_id),
        ("read-headers", sent.message_id),
    ]


async def test_looking_changes_nothing(place: MemoryPlace, browser: Browser) -> None:
    sent = await place.mailbox.send_message(message(topic="quiet"))
    before = await place.mailbox.get_backlog()
    await browser.sign_in(place.issue())
    for path in (f"/messages/{sent.message_id}", f"/message/payload?id={sent.message_id}", "/messages"):
        assert (await browser.get(path)).status == 200
    for path in ("redrive", "archive", "purge", "resend"):
        assert (await browser.get(f"/message/{path}?id={sent.message_id}")).status == 200
    assert (await place.mailbox.get_backlog()).position == before.position


@pytest.mark.parametrize("id_", NASTY_IDS.values(), ids=NASTY_IDS)
async def test_a_message_is_shown_whatever_its_id(place: MemoryPlace, browser: Browser, id_: str) -> None:
    await place.mailbox.send_message(message(SCRIPT.encode(), message_id=id_, attrs={SCRIPT: RTL + SCRIPT}))
    await place.mailbox.send_message(message(message_id="child", causality_parent=id_))
    await browser.sign_in(place.issue())
    child = await browser.get("/messages/child")
    (link,) = {unescape(each) for each in re.findall(r'href="/console(/messages[^"]*)"', child.text)} - {
        "/messages",
        "/messages?id=child",
    }
    for path in (link, f"/messages?id={quote(id_, safe='')}"):
        page = await browser.get(path)
        assert page.status == 200
        assert "<h1>Message</h1>" in page.text
        assert SCRIPT not in page.text
        assert "&lt;script&gt;" in page.text
        assert not set(page.text) & {RTL, "\0", "\x1b"} - set(id_)


async def test_signing_in_leads_to_the_message_that_was_asked_for(
    place: MemoryPlace, browser: Browser
) -> None:
    for id_ in ("100%/2F ü", "a?b#c"):
        await place.mailbox.send_message(message(message_id=id_))
        browser.client.cookie_jar.clear()
        page = await browser.get(f"/messages/{quote(id_, safe='')}")
        (target,) = re.findall(r'name="next" value="([^"]*)"', page.text)
        page = await browser.sign_in(place.issue(), next=unescape(target))
        assert f"Message {id_} ·" in unescape(page.text)


async def test_a_token_that_reads_headers_only_sees_no_payload(place: MemoryPlace, browser: Browser) -> None:
    sent = await place.mailbox.send_message(message(b"secret body", attrs={"tenant": "acme"}))
    await browser.sign_in(place.issue(operations=[READ_HEADERS]))
    page = await browser.get(f"/messages/{sent.message_id}")
    assert page.status == 200
    assert "acme" in page.text
    assert "secret" not in page.text
    assert "b3:" not in page.text
    assert "reading headers only" in page.text
    assert "Edit and resend" not in page.text
    download = await browser.get(f"/message/payload?id={sent.message_id}")
    assert download.status == 403
    assert "secret" not in download.text
    assert "secret" not in (await browser.get(f"/message/resend?id={sent.message_id}")).text
    assert {each.operation for each in place.audit.entries if each.outcome == "allowed"} == {"read-headers"}


async def test_an_unknown_message_and_one_of_another_topic_have_the_same_answer(
    place: MemoryPlace, browser: Browser
) -> None:
    sent = await place.mailbox.send_message(message(topic="payments"))
    await browser.sign_in(place.issue(topics=["orders"]))
    for path in ("/messages?id=", "/message/payload?id=", "/message/redrive?id=", "/message/resend?id="):
        answers = [await browser.get(path + id_) for id_ in (sent.message_id, "nobody")]
        assert [each.status for each in answers] == [403, 403]
        one, other = (re.sub(r"[0-9a-f-]{36}|nobody", "", each.text) for each in answers)
        assert one == other
    await browser.sign_in(place.issue())
    assert (await browser.get("/messages/nobody")).status == 404


async def test_a_payload_is_downloaded_and_never_opened_by_the_browser(place: MemoryPlace) -> None:
    body = b"<html>" + SCRIPT.encode() * 200_000  # 5 MB
    async with (
        open_memory_mailbox(limits=MailboxLimits(frame_bytes=8 << 20)) as mailbox,
        served_console(mailbox) as browser,
    ):
        sent = await mailbox.send_message(message(body, content_type="text/html", message_id='x"/../y'))
        page = await browser.get(f"/messages?id={quote(sent.message_id, safe='')}")
        assert SCRIPT not in page.text
        assert "This is the first part" in page.text
        assert len(page.text) < 400_000
        query = {"id": sent.message_id}
        async with browser.client.get(f"{browser.url}/message/payload", params=query) as answer:
            assert await answer.read() == body
            assert answer.headers["content-type"] == "application/octet-stream"
            assert answer.headers["content-disposition"] == 'attachment; filename="x_____y.txt"'
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    ("payload", "shown"),
    [
        (b"\x00\xff<b>", "00 ff 3c 62 3e"),
        (f"a{RTL}b\0".encode(), "a\\u202eb\\x00"),
        (b"", "The payload is empty."),
        ("שלום".encode(), "שלום"),
        (b'{"a":' * 200 + b"1" + b"}" * 200, '"a": 1'),
    ],
    ids=["binary", "bidi", "empty", "hebrew", "nested"],
)
async def test_a_payload_is_shown_by_its_content(payload: bytes, shown: str) -> None:
    async with open_memory_mailbox() as mailbox, served_console(mailbox) as browser:
        sent = await mailbox.send_message(message(payload))
        assert shown in unescape((await browser.get(f"/messages/{sent.message_id}")).text)


async def test_a_compressed_payload_is_shown_decompressed_and_downloaded_as_it_was_sent() -> None:
    envelope = PrismEnvelope.FromString(build("zipped"))
    envelope.payload.value = gzip.compress(b'{"zipped": true}')
    envelope.metadata.content_encoding = "gzip"
    async with open_memory_mailbox() as mailbox, served_console(mailbox) as browser:
        await mailbox.send_envelopes([envelope.SerializeToString()])
        assert '"zipped": true' in unescape((await browser.get("/messages/zipped")).text)
        async with browser.client.get(f"{browser.url}/message/payload?id=zipped") as answer:
            assert await answer.read() == envelope.payload.value
            assert answer.headers["content-disposition"] == 'attachment; filename="zipped.gz"'


async def ack_with(mailbox: Any, payload: bytes, content_type: str | None = None) -> str:
    sent = await mailbox.send_message(message(b'{"order": 1}', topic="work"))
    await (await receive_one(mailbox, "work")).ack(result=payload, content_type=content_type)
    return str(sent.message_id)


@pytest.mark.parametrize(
    ("payload", "content_type", "shown"),
    [
        (b'{"total":1.10}', "application/json", '{\n  "total": 1.10\n}'),
        (b'{"total":1.10}', None, '{\n  "total": 1.10\n}'),
        (b'{"half', "application/json", "The result is not JSON"),
        (b"\x00\xff<b>", None, "00 ff 3c 62 3e"),
        (f"a{RTL}b".encode(), "text/plain", "a\\u202eb"),
        (b"", None, "The result is empty."),
    ],
    ids=["json", "guessed", "invalid", "binary", "bidi", "empty"],
)
async def test_a_result_is_shown_by_its_content_as_payloads_are(
    payload: bytes, content_type: str | None, shown: str
) -> None:
    async with open_memory_mailbox() as mailbox, served_console(mailbox) as browser:
        id_ = await ack_with(mailbox, payload, content_type)
        _, _, section = unescape((await browser.get(f"/messages/{id_}")).text).partition('<h2 id="result">')
        assert shown in section
        assert f"{len(payload)} bytes" in section
        assert (content_type is not None) == ("Content type" in section)
        assert ("Download the result" in section) == bool(payload)


async def test_a_hostile_result_is_shown_as_text_and_downloaded_as_a_file(
    place: MemoryPlace, browser: Browser
) -> None:
    body, kind = SCRIPT.encode() * 2_600, f'text/html; x="{SCRIPT}{RTL}"'  # up to the limit of a result
    id_ = await ack_with(place.mailbox, body, kind)
    await browser.sign_in(place.issue())
    page = await browser.get(f"/messages/{id_}")
    assert SCRIPT not in page.text
    assert RTL not in page.text
    assert 'aria-label="More of the result"' in page.text
    query = {"id": id_, "part": "result"}
    async with browser.client.get(f"{browser.url}/message/payload", params=query) as answer:
        assert await answer.read() == body
        assert answer.headers["content-type"] == "application/octet-stream"
        assert answer.headers["content-disposition"] == f'attachment; filename="{id_}-result.txt"'
    await browser.sign_in(place.issue(operations=[READ_HEADERS]))
    page = await browser.get(f"/messages/{id_}")
    assert 'id="result"' not in page.text
    assert "to see payloads and results it needs" in page.text
    assert (await browser.get(f"/message/payload?id={id_}&part=result")).status == 403
    await browser.sign_in(place.issue(topics=["payments"]))
    for path in (f"/messages/{id_}", f"/message/payload?id={id_}&part=result"):
        page = await browser.get(path)
        assert (page.status, "alert(1)" in page.text) == (403, False)


async def test_a_hostile_traceback_is_shown_as_text_to_those_who_may_read_payloads(
    place: MemoryPlace, browser: Browser
) -> None:
    received = await receive_one(place.mailbox)
    text = f"Traceback (most recent call last):\n  {SCRIPT}{RTL}\nValueError"
    await place.mailbox.nack_messages([received.receipt], traceback=text, action="reject")
    await browser.sign_in(place.issue())
    page = await browser.get(f"/messages/{received.message_id}")
    _, _, section = page.text.partition('aria-label="Traceback"')
    assert "Traceback (most recent call last):\n  &lt;" in section
    assert SCRIPT not in page.text
    assert RTL not in page.text
    await browser.sign_in(place.issue(operations=[READ_HEADERS]))
    assert "most recent call" not in (await browser.get(f"/messages/{received.message_id}")).text


async def test_a_dead_letter_begins_with_why_it_died_and_what_to_do(
    place: MemoryPlace, browser: Browser
) -> None:
    await place.mailbox.set_topic_policy("bills", TopicPolicy(max_attempts=1))
    await place.mailbox.send_message(message(topic="bills", message_id="bill"))
    (received,) = await place.mailbox.receive_messages("bills", consumer="printer-1")
    trace = "Traceback (most recent call last):\nValueError"
    await place.mailbox.nack_messages([received.receipt], reason="no paper <b>", traceback=trace)
    await browser.sign_in(place.issue())
    page = await browser.get("/messages/bill")
    why, _, rest = page.text.partition('id="payload"')
    shown = (
        "no paper &lt;b&gt;",
        trace,
        "attempt 1 of 1",
        "printer-1",
        "/message/redrive?id=bill",
        "max_attempts",
    )
    assert [each for each in shown if each not in why] == []
    assert "postroom dlq" not in page.text
    assert re.search(r"<details>\s*<summary><h2 id=\"headers\">", rest)
    assert re.search(r"<details>\s*<summary><h2 id=\"hashes\">", rest)
    alike = re.findall(r'href="/console(/dead-letters/letters[^"]*)"', why)
    assert "bill" in (await browser.get(unescape(alike[0]))).text


async def test_a_message_without_a_result_has_none_to_download() -> None:
    async with open_memory_mailbox() as mailbox, served_console(mailbox) as browser:
        await mailbox.send_message(message(message_id="m"))
        await (await receive_one(mailbox)).ack()
        assert 'id="result"' not in (await browser.get("/messages/m")).text
        page = await browser.get("/message/payload?id=m&part=result")
        assert (page.status, "m has no result" in page.text) == (404, True)


async def test_the_result_of_an_encrypted_message_is_shown_until_its_key_is_destroyed(tmp_path: Path) -> None:
    erasure, store = new_erasure(tmp_path), str(tmp_path / "store.db")
    async with (
        open_mailbox(store, erasure=erasure) as mailbox,
        served_console(mailbox, store=store) as browser,
    ):
        sent = await mailbox.send_message(message(principal="alice"))
        await (await receive_one(mailbox)).ack(result=b"the balance of alice")
        path = f"/messages/{sent.message_id}"
        assert "the balance of alice" in (await browser.get(path)).text
        keys = keys_of(erasure)
        keys.destroy(keys.get(["alice"])["alice"].pseudonym, 1)
        page = await browser.get(path)
        assert "balance" not in page.text
        assert "the key of its subject was destroyed" in page.text
        assert (await browser.get(f"/message/payload?id={sent.message_id}&part=result")).status == 404


async def test_an_altered_message_is_shown_as_altered_with_the_hash_that_does_not_match(
    tmp_path: Path,
) -> None:
    place, store = sqlite_place(tmp_path), str(tmp_path / "store.db")
    async with place.open() as mailbox:
        await mailbox.send_message(message(b"precious", message_id="m"))
        await mailbox.send_message(message(b"other", message_id="intact"))
    alter(store, "envelopes", lambda stored: stored.replace(b"precious", b"qrecious"))
    async with place.open() as mailbox, served_console(mailbox, store=store) as browser:
        assert await mailbox.receive_messages("orders", max_messages=1) != []
        page = unescape((await browser.get("/messages/m")).text)
        assert "E_INTEGRITY" in page
        assert "Its stored bytes no longer match their hash" in page
        assert page.count("does not match") >= 3
        assert "computed now" in page
        intact = unescape((await browser.get("/messages/intact")).text)
        assert "This message is unaltered" in intact
        assert "does not match" not in intact


async def test_of_a_long_history_the_first_event_and_the_latest_are_shown() -> None:
    policy = TopicPolicy(max_attempts=1_000)
    async with open_memory_mailbox(default_policy=policy) as mailbox, served_console(mailbox) as browser:
        await mailbox.send_message(message(message_id="m"))
        for _ in range(400):
            (received,) = await mailbox.receive_messages("orders")
            await received.nack(delay_ms=0, reason=f"attempt {received.attempt}")
        page = unescape((await browser.get("/messages/m")).text)
        assert page.count('class="number"><a href="/console/log/events/') == 500
        assert "301 between them" in page
        assert "Sent to orders" in page
        assert "attempt 400" in page
        assert "attempt 100." not in page


async def test_a_message_that_retention_removed_is_unknown() -> None:
    async with open_memory_mailbox() as mailbox, served_console(mailbox) as browser:
        await mailbox.send_message(message(message_id="m"))
        (received,) = await mailbox.receive_messages("orders")
        await received.ack()
        await mailbox.clock.advance(10)
        await mailbox.send_message(message(message_id="later"))
        await mailbox.delete_old_events(mailbox.clock.wall() - 1)
        for path in ("/messages/m", "/message/payload?id=m", "/message/redrive?id=m", "/message/resend?id=m"):
            page = await browser.get(path)
            assert page.status == 404
            assert "has no message m" in unescape(page.text)


async def test_masked_fields_are_hidden_from_those_without_the_right_admin(place: MemoryPlace) -> None:
    settings = ConsoleSettings(
        mask_headers=("Authorization", "correlation_id", "causality_parent", "principal"),
        mask_payload_fields=("/card/number",),
    )
    await place.mailbox.send_message(
        message(
            b'{"card":{"number":"4111"}}',
            message_id="m",
            attrs={"authorization": "hunter2", "tenant": "acme"},
            correlation_id="hunter2",
            causality_parent="hunter2",
            principal="hunter2",
        )
    )
    await place.mailbox.send_message(message(b"card 4111", message_id="text"))
    for each in await place.mailbox.receive_messages("orders"):
        await each.ack(result=each.payload)
    await place.mailbox.send_message(message(b"{}", message_id="plain", principal="hunter2"))
    async with served_console(place.mailbox, access=access_of(place), settings=settings) as browser:
        await browser.sign_in(place.issue(operations=[READ_HEADERS, READ_PAYLOAD, Right.SEND]))
        for path in (
            "/messages/m",
            "/messages/text",
            "/messages/plain",
            "/message/resend?id=plain",
            "/message/payload?id=m",
            "/message/payload?id=text",
            "/message/payload?id=m&part=result",
            "/message/payload?id=text&part=result",
            "/message/resend?id=m",
            "/message/resend?id=text",
        ):
            text = (await browser.get(path)).text
            assert "4111" not in text
            assert "hunter2" not in text
            assert "NDExMS" not in text  # in base64
        page = await browser.get("/messages/m")
        assert "[masked]" in page.text
        assert "acme" in page.text
        assert "b3:" not in page.text
        await browser.sign_in(place.issue())
        page = await browser.get("/messages/m")
        assert "4111" in page.text
        assert "hunter2" in page.text


async def test_behind_a_proxy_calls_to_be_copied_go_to_the_proxy_with_tls() -> None:
    protection = SurfaceProtection(behind_proxy=True)
    async with (
        open_memory_mailbox() as mailbox,
        served_console(mailbox, protection=protection, trusts_proxy=True) as browser,
    ):
        await mailbox.send_message(message(message_id="m"))
        page = await browser.get("/messages/m", headers={"x-forwarded-prefix": "/queue"})
        calls = re.findall(r'<pre id="snippet-[^>]*>([^<]*)</pre>', page.text)
        host = browser.url.removeprefix("http://").removesuffix("/console")
        assert f"https://{host}/queue/v1/messages/m" in calls[0]
        assert not any("http://" in each for each in calls)


async def test_protobuf_is_decoded_by_the_schema_of_its_namespace(tmp_path: Path) -> None:
    file = tmp_path / "namespaces.yaml"
    file.write_text(NAMESPACES)
    descriptors = FileDescriptorSet()
    source_context_pb2.DESCRIPTOR.CopyToProto(descriptors.file.add())
    (tmp_path / "source.binpb").write_bytes(descriptors.SerializeToString())
    payload = source_context_pb2.SourceContext(file_name="4111").SerializeToString()
    settings = ConsoleSettings(namespaces=str(file), mask_payload_fields=("/file_name",))
    async with (
        controlled_mailbox() as place,
        served_console(place.mailbox, access=access_of(place), settings=settings) as browser,
    ):
        await place.mailbox.send_message(message(payload, message_id="m"))
        await browser.sign_in(place.issue())
        page = unescape((await browser.get("/messages/m")).text)
        assert '"file_name": "4111"' in page
        assert "protobuf" in page
        await browser.sign_in(place.issue(operations=[READ_HEADERS, READ_PAYLOAD]))
        for path in ("/messages/m", "/message/payload?id=m"):
            text = unescape((await browser.get(path)).text)
            assert "4111" not in text
            assert "[masked]" in text


@pytest.mark.parametrize(
    "settings",
    [
        ConsoleSettings(mask_payload_fields=("card",)),
        ConsoleSettings(mask_headers=("",)),
        ConsoleSettings(namespaces="/nowhere/namespaces.yaml"),
    ],
    ids=["pointer", "header", "namespaces"],
)
def test_invalid_settings_of_the_page_are_refused_at_the_start(settings: ConsoleSettings) -> None:
    with pytest.raises(InvalidRequest):
        console_mount("memory:", settings)
