"""A small store whose messages have hostile text in every field that a sender or consumer writes."""

import asyncio
import json
from pathlib import Path

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.projections import LocalTaskRunner, rebuild_projections
from postroom.application.messages import NewMessage
from postroom.domain.errors import Rejected
from postroom.domain.names import DEFAULT_MAILBOX
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.subscription import SubscriptionFilter

XSS = "\"'><img src=x onerror=alert(1)><script>alert(2)</script>{{7*7}}"
SCRIPT_URL = "javascript:alert(3)"
RTL = "\u202egnp.exe\u202c \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627"
LONG_ID = "order-" + "0123456789" * 24 + "-end"
TOPIC, QUIET_TOPIC = "orders.created", "mail.requested"
REASON = f"can't charge the card {XSS} {RTL}"
DEAD = 12
"""Number of dead letters of the topic."""
LARGE_BODY = b'{"lines": [' + b",".join(b'"%064d"' % number for number in range(75_000)) + b"]}"


def create_store(path: Path) -> None:
    """Create the store with its read models; no event loop may run."""
    asyncio.run(_fill(str(path)))
    rebuild_projections(str(path), runner=LocalTaskRunner())


async def _fill(store: str) -> None:
    async with open_mailbox(store, DEFAULT_MAILBOX, limits=MailboxLimits(frame_bytes=8 << 20)) as mailbox:
        # What tests receive and don't settle stays in flight, however slow the machine is.
        patient = TopicPolicy(max_attempts=1, visibility_ms=3_600_000, replay_window_ms=7_200_000)
        await mailbox.set_topic_policy(TOPIC, patient)
        await fail(mailbox, [_order(f"order-{number}") for number in range(DEAD - 1)] + [_hostile(LONG_ID)])
        await _send(
            mailbox,
            [
                _hostile(XSS),
                _hostile(SCRIPT_URL),
                _hostile(f"a/b?c=d&e=%2F#{RTL}"),
                _message("large", LARGE_BODY, "application/json"),
                _message("binary", bytes(range(256)) * 40, "application/octet-stream"),
                _message("protobuf", b"\x0a\x05order\x10\x96\x01", "application/x-protobuf"),
                _message("html", f"<html><body>{XSS}</body></html>".encode(), "text/html"),
                _message("invalid", b'{"half": \xff', "application/json"),
                *(_order(f"waiting-{number}") for number in range(30)),
            ],
        )
        await mailbox.set_schedule(
            "nightly", ScheduleSpec("orders.nightly", "0 3 * * *", headers={XSS: XSS, RTL: RTL})
        )
        await mailbox.set_subscription("mail", SubscriptionFilter(("refunds.*",), {XSS: XSS, RTL: RTL}))


async def fail(mailbox: OwnedMailbox, messages: list[NewMessage]) -> None:
    """Send messages of the topic, and have each become a dead letter."""
    await _send(mailbox, messages)
    deliveries = await mailbox.receive_messages(TOPIC, max_messages=len(messages), consumer=XSS[:60])
    assert len(deliveries) == len(messages)
    for delivery in deliveries:
        await mailbox.nack_messages([delivery.receipt], reason=REASON)


async def _send(mailbox: OwnedMailbox, messages: list[NewMessage]) -> None:
    for answer in await mailbox.send_batch(messages):
        if isinstance(answer, Rejected):
            raise answer


def _order(id_: str) -> NewMessage:
    body = json.dumps({"order": id_, "note": XSS, "amount": 12.5}).encode()
    return _message(id_, body, "application/json", TOPIC)


def _message(id_: str, payload: bytes, content_type: str, topic: str = QUIET_TOPIC) -> NewMessage:
    return NewMessage(
        topic=topic,
        payload=payload,
        content_type=content_type,
        message_id=id_,
        principal="shop-lima",
        attrs={"currency": "EUR"},
    )


def _hostile(id_: str) -> NewMessage:
    return NewMessage(
        topic=TOPIC if id_ == LONG_ID else QUIET_TOPIC,
        payload=f"{XSS} {RTL}".encode(),
        content_type=f"text/html; {XSS}",
        message_id=id_,
        idem_key=f"{XSS} {id_}"[:255],
        sticky_key=XSS,
        principal=XSS,
        correlation_id=f"{XSS} {RTL}",
        causality_parent=XSS,
        schema_url=SCRIPT_URL,
        schema_version=XSS,
        attrs={XSS: XSS, "link": SCRIPT_URL, RTL: RTL, "bytes": b"\x00\xff"},
    )
