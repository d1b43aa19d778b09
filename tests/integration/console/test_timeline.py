"""The timeline of a correlation id: who caused what, how long it took, and for whom it is shown."""

import re
from collections.abc import AsyncIterator
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.adapters.compose.testing import ManualClock
from postroom.adapters.console.pages import timeline
from postroom.adapters.console.sparklines import TimeScale
from postroom.application.messages import NewMessage
from postroom.application.queries import trace_messages
from postroom.application.queries.trace_messages import Cause, MessageTrace
from postroom.domain.capability.rights import Right
from postroom.domain.message import (
    MessageAcked,
    MessageDeadLettered,
    MessageEvent,
    MessageRequeued,
)
from postroom.domain.message_history import trace
from postroom.domain.policy import TopicPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.conformance.records import received, sent, stream
from tests.integration.console.conftest import access_of
from tests.support.access import Controlled, controlled_mailbox
from tests.support.messages import MAILBOX, receive_one
from tests.support.servers.console import Browser, served_console
from tests.support.waiting import until_answer
from tests.unit.application.test_trace_messages import found

Place = Controlled[OwnedMailbox, ManualClock]
REQUEST = "request-7"
HOSTILE = "<script>alert(1)</script>\u202e"


def of_request(id_: str, topic: str, cause: str | None = None, **fields: Any) -> NewMessage:
    """Return a message of the request."""
    return NewMessage(
        topic=topic,
        payload=b"{}",
        message_id=id_,
        correlation_id=fields.pop("correlation_id", REQUEST),
        causality_parent=cause,
        **fields,
    )


async def fill(mailbox: OwnedMailbox) -> None:
    """Have an order paid for in vain, and others of the same request wait."""
    await mailbox.set_topic_policy("payments", TopicPolicy(max_attempts=1))
    await mailbox.set_subscription("audit", SubscriptionFilter(("orders",)))
    await mailbox.send_message(of_request("order", "orders", principal="ada"))
    await (await receive_one(mailbox)).ack()
    await mailbox.send_message(of_request("payment", "payments", "order"))
    await (await receive_one(mailbox, "payments")).nack(reason=f"no money {HOSTILE}")
    await mailbox.send_message(of_request("mail", "mails", "payment"))
    await receive_one(mailbox, "mails")
    await mailbox.send_message(of_request("late", "orders", "elsewhere"))
    await mailbox.send_message(of_request("another", "orders", correlation_id="request-8"))
    await mailbox.send_batch(
        [
            of_request(f"loop-{HOSTILE}", "mails", "loop-2", correlation_id="loop", principal=HOSTILE),
            of_request("loop-2", "mails", f"loop-{HOSTILE}", correlation_id="loop"),
        ]
    )

    async def is_copied() -> bool:
        return len(await mailbox.peek_messages("audit")) == 3

    await until_answer(is_copied)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """A mailbox with the messages of a request, and read models of them."""
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, MAILBOX) as mailbox:
        await fill(mailbox)
    rebuild_projections(store, runner=LocalTaskRunner())
    async with open_mailbox(store, MAILBOX) as mailbox:
        yield Controlled(mailbox, ManualClock())


@pytest.fixture
async def browser(place: Place, tmp_path: Path) -> AsyncIterator[Browser]:
    """A browser at its console, which asks for tokens."""
    store = str(tmp_path / "store.db")
    async with served_console(place.mailbox, store=store, access=access_of(place)) as browser:
        yield browser


def rows(text: str) -> list[str]:
    """Return the text of each row of the table of messages."""
    bodies = re.findall(r"<tr>(.*?)</tr>", text.partition("<tbody>")[2], re.DOTALL)
    return [" ".join(unescape(re.sub(r"<svg.*?</svg>|<.*?>", " ", each)).split()) for each in bodies]


async def test_messages_stand_below_their_causes_with_what_became_of_them(
    place: Place, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get(f"/timeline?correlation_id={REQUEST}")
    assert page.status == 200
    shown = rows(page.text)
    starts = [re.match(r"(└ Level \d: )?\S+ \S+", each)[0] for each in shown]  # type: ignore[index] # all do
    copies = [each for each in starts if each.startswith("└ Level 2: audit ")]
    others = [each for each in starts if each not in copies]
    assert len(copies) == 2
    assert others == ["orders order", "└ Level 2: payments payment", "└ Level 3: mails mail", "orders late"]
    by_id = dict(zip(starts, shown, strict=True))
    assert " acked" in by_id["orders order"]
    assert "Copy for the subscription of a message on orders." in by_id[copies[0]]
    assert "dead Max attempts: no money" in by_id["└ Level 2: payments payment"]
    assert re.search(r"Sent \S+ m?s after its cause, on orders\.", by_id["└ Level 2: payments payment"])
    assert "in flight Attempt 1." in by_id["└ Level 3: mails mail"]
    assert "Caused by elsewhere , which is not among these messages." in by_id["orders late"]
    assert "6 messages on 4 topics: " in page.text
    assert page.text.count('<svg class="trace"') == 6
    assert page.text.count(">✕</text>") == page.text.count(">✓</text>") == 1
    assert "another" not in page.text
    assert HOSTILE[:8] not in page.text
    assert "\u202e" not in page.text


async def test_loops_of_causes_are_told_and_text_of_others_is_escaped(place: Place, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    page = await browser.get("/timeline?correlation_id=loop")
    shown = rows(page.text)
    assert len(shown) == 2
    assert "Its causes lead back to itself" in shown[0]
    assert shown[1].startswith("└ Level 2: mails loop-2")
    assert "<script>alert" not in page.text
    assert "\u202e" not in page.text


async def test_a_token_of_some_topics_sees_the_messages_of_these_and_tells_of_no_other(
    place: Place, browser: Browser
) -> None:
    await browser.sign_in(place.issue(topics=["mails", "audit"]))
    page = await browser.get(f"/timeline?correlation_id={REQUEST}")
    shown = rows(page.text)
    assert sorted(each.split()[0] for each in shown) == ["audit", "audit", "mails"]
    assert "Caused by payment , which is not among these messages." in " ".join(shown)
    assert " ".join(shown).count("its original is not among these messages") == 2
    assert "payments" not in page.text
    assert ">orders<" not in page.text
    assert "3 messages on 2 topics" in page.text
    entries = [each for each in place.audit.entries if each.criteria[:1] == ("timeline",)]
    assert [(each.topics, each.matches, each.operation) for each in entries] == [
        (("mails", "audit"), 3, "read-headers")
    ]


async def test_the_timeline_needs_the_right_to_read_headers(place: Place, browser: Browser) -> None:
    await browser.sign_in(place.issue(operations=[Right.SEND]))
    assert (await browser.get(f"/timeline?correlation_id={REQUEST}")).status == 403
    await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
    assert (await browser.get(f"/timeline?correlation_id={REQUEST}")).status == 200


async def test_masked_causes_are_not_drawn_and_masked_correlation_ids_not_searched(
    place: Place, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"store": str(tmp_path / "store.db"), "access": access_of(place)}
    hidden = ConsoleSettings(mask_headers=("causality_parent", "principal"))
    async with served_console(place.mailbox, settings=hidden, **options) as browser:
        await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
        page = await browser.get(f"/timeline?correlation_id={REQUEST}")
        assert "its cause, on" not in page.text
        assert "elsewhere" not in page.text
        assert "ada" not in re.sub(r"<.*?>", " ", page.text).split()
        assert "Which message caused which is hidden" in page.text
    hidden = ConsoleSettings(mask_headers=("correlation_id",))
    async with served_console(place.mailbox, settings=hidden, **options) as browser:
        await browser.sign_in(place.issue(operations=[Right.READ_HEADERS]))
        assert (await browser.get(f"/timeline?correlation_id={REQUEST}")).status == 403


async def test_more_messages_than_are_shown_are_told(
    place: Place, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline, "MAX_MESSAGES", 4)
    await browser.sign_in(place.issue())
    page = await browser.get(f"/timeline?correlation_id={REQUEST}")
    assert (len(rows(page.text)), "There are more" in page.text) == (4, True)


async def test_links_lead_to_the_timeline(place: Place, browser: Browser) -> None:
    await browser.sign_in(place.issue())
    link = f'href="/console/timeline?correlation_id={REQUEST}"'
    assert link in (await browser.get("/messages/order")).text
    assert link in (await browser.get(f"/search?correlation_id={REQUEST}")).text
    assert link not in (await browser.get("/search?topics=orders")).text


async def test_without_an_id_there_is_a_form_and_an_unknown_one_has_no_messages(
    place: Place, browser: Browser
) -> None:
    await browser.sign_in(place.issue())
    assert 'name="correlation_id"' in (await browser.get("/timeline")).text
    for id_ in ("none", HOSTILE, "x" * 3_000):
        page = await browser.get("/timeline", params={"correlation_id": id_})
        assert (page.status, "No message has this correlation id" in page.text) == (200, True), id_[:20]


async def test_messages_that_no_read_models_have_are_found_in_the_latest_events(
    place: Place, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.mailbox.send_message(of_request("newest", "mails", "mail"))
    await (await receive_one(place.mailbox, "mails")).ack()
    await browser.sign_in(place.issue())
    shown = rows((await browser.get(f"/timeline?correlation_id={REQUEST}")).text)
    assert [each for each in shown if each.startswith("└ Level 4: mails newest")]
    assert len(shown) == 7
    await browser.sign_in(place.issue(topics=["payments"]))
    assert len(rows((await browser.get(f"/timeline?correlation_id={REQUEST}")).text)) == 1
    monkeypatch.setattr(trace_messages, "RECENT_POSITIONS", 0)
    await browser.sign_in(place.issue())
    assert len(rows((await browser.get(f"/timeline?correlation_id={REQUEST}")).text)) == 6


async def test_without_read_models_unsettled_messages_and_recent_ones_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(tmp_path / "store.db")
    async with open_mailbox(store, MAILBOX) as mailbox:
        await fill(mailbox)
        async with served_console(mailbox, store=store) as browser:
            page = await browser.get(f"/timeline?correlation_id={REQUEST}")
            assert "postroom views rebuild" in page.text
            assert any(each.startswith("orders order") for each in rows(page.text))
            monkeypatch.setattr(trace_messages, "RECENT_POSITIONS", 0)
            page = await browser.get(f"/timeline?correlation_id={REQUEST}")
            assert not any(each.startswith("orders order") for each in rows(page.text))
            assert any("Caused by order , which is not among these" in each for each in rows(page.text))


async def test_a_mailbox_in_memory_has_no_log_to_read() -> None:
    async with (
        controlled_mailbox() as place,
        served_console(place.mailbox, access=access_of(place)) as browser,
    ):
        await browser.sign_in(place.issue())
        page = await browser.get("/timeline?correlation_id=x")
        assert (page.status, "postroom log show" in page.text) == (404, True)


# -- clocks ---


def trace_of(*events: MessageEvent, cause: str = "", published: int = 0) -> MessageTrace:
    """Return the trace of a message with these events."""
    history = trace((position, 1, event, None) for position, event in enumerate(events, 1))
    return MessageTrace(found(1, 1), history, cause, "", published, True)


def test_bars_and_durations_of_a_clock_that_was_set_back_stay_within_the_scale() -> None:
    events: list[MessageEvent] = [
        sent(1, at=10_000_000),
        received(1, at=4_000_000),
        MessageRequeued(stream(1), 3, 12_000_000, 1, 1, "nacked", "boom"),
        received(1, version=4, at=3_000_000),
        MessageAcked(stream(1), 5, 2_000_000, 2),
    ]
    each = trace_of(*events, published=15_000_000)
    assert each.history is not None
    spans = timeline._spans(each.history, 0)
    assert [part.end - part.start for part in spans] == [-6_000_000, 8_000_000, -9_000_000, -1_000_000]
    bar = timeline._scale([each]).bar(spans)
    numbers = [float(number) for number in re.findall(r'(?:x|width)="(-?[\d.]+)%"', bar)]
    assert numbers
    assert all(0 <= number <= 100 for number in numbers)
    notes = " ".join(timeline._notes(Cause(each, 0, None, False)))
    assert "Its times go back" in notes
    assert "5\N{NO-BREAK SPACE}s after it was stored" in notes
    assert timeline._write(-6_000_000).startswith("\N{MINUS SIGN}6")


def test_an_effect_that_was_sent_before_its_cause_says_so() -> None:
    cause = trace_of(sent(1, at=9_000_000))
    effect = trace_of(sent(2, at=5_000_000), cause="1")
    notes = " ".join(timeline._notes(Cause(effect, 1, cause, False)))
    assert re.search(r"Sent 4\ss before its cause, on orders", notes)


def test_a_failed_delivery_and_a_dead_letter_have_signs_of_their_own() -> None:
    dead = MessageDeadLettered(stream(1), 5, 5_000, 2, "max_attempts", "boom", 9_000)
    each = trace_of(
        sent(1, at=1_000),
        received(1, at=2_000),
        MessageRequeued(stream(1), 3, 3_000, 1, 1, "nacked", "boom"),
        received(1, version=4, at=4_000),
        dead,
    )
    assert each.history is not None
    marks = [part.mark for part in timeline._spans(each.history, 9_000)]
    assert marks == ["", "fail", "", "", "dead"]


@pytest.mark.parametrize("length", [0, 1, 7, 999, 12_345, 1_000_000, 86_400_000_000, 10**15, 10**17])
def test_a_scale_has_a_few_lines_whatever_it_spans(length: int) -> None:
    scale = TimeScale(5, 5 + length)
    assert scale.bar([]).count("<line") <= 8
    assert scale.place(0) == 0.0
    assert scale.place(5 + 2 * length + 10) == 100.0
