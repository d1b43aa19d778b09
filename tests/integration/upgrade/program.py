"""A program that released versions of Postroom run as well as this one: it writes, reads and uses mailboxes.

    PYTHON program.py STEP ADDRESS < FACTS

STEP is the name of a function below, and FACTS is what an earlier step printed, as JSON. It uses nothing
but the public names of the last release.
"""

import asyncio
import json
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import msgspec

from postroom import (
    Mailbox,
    MailboxOutbox,
    MessageResult,
    NewMessage,
    PostroomError,
    RedriveSpec,
    ScheduleSpec,
    SettingsChanges,
    SubscriptionFilter,
    connect,
    read_receipt,
    write_receipt,
)

Facts = dict[str, Any]
YEAR_MS = 365 * 24 * 3_600_000
TIMEOUT_MS = 120_000
LASTING = {
    "shards": 2,
    "max_attempts": 1,
    "visibility_ms": 3_600_000,
    "replay_window_ms": YEAR_MS,
    "ready_retention_ms": YEAR_MS,
    "dead_retention_ms": YEAR_MS,
}
ORDERS = [
    NewMessage(
        topic="orders",
        payload=b'{"order": %d}' % number,
        message_id=f"order-{number}",
        idem_key=f"key-{number}",
        sticky_key=f"customer-{number % 3}",
        content_type="application/json",
        attrs={"region": "eu", "number": str(number)},
    )
    for number in range(12)
]


def connected(address: str) -> Any:
    """Return a connection, whose calls wait long enough for a busy machine."""
    return connect(address, timeout_ms=TIMEOUT_MS)


async def write(address: str, _: Facts) -> Facts:
    """Write messages in every state, and everything else that a mailbox stores; return it as it is then."""
    async with connected(address) as mailbox:
        await mailbox.set_settings(
            SettingsChanges(topics={"orders": LASTING, "mail.*": {"ordered_keys": True}, "audit": LASTING})
        )
        await mailbox.set_subscription("audit", SubscriptionFilter(("orders",)))
        await mailbox.send_batch(ORDERS)
        receipts = {
            each.message_id: each.receipt for each in await mailbox.receive_messages("orders", max_messages=7)
        }
        acked, answered, failed, rejected, redriven, *held = receipts
        await mailbox.ack_messages([receipts[acked]])
        result = MessageResult(b"42", "text/plain")
        await mailbox.ack_messages([receipts[answered]], results=[result])
        await mailbox.nack_messages([receipts[failed]], reason="no such customer", traceback="Traceback: one")
        await mailbox.nack_messages(
            [receipts[rejected], receipts[redriven]], reason="no stock", action="reject"
        )
        await mailbox.redrive_dead_letters("orders", message_ids=[redriven])
        (copy,) = await mailbox.receive_messages("audit", max_messages=1)
        for topic in ("mail.a", "mail.b", "later", "paused", "unique"):
            options: Facts = {"sticky_key": "ann"} if topic.startswith("mail") else {}
            options |= {"deliver_after_ms": YEAR_MS // 2} if topic == "later" else {}
            options |= {"unique_key": "one"} if topic == "unique" else {}
            await mailbox.send_message(
                NewMessage(
                    topic=topic,
                    payload=b"\x00\xff",
                    message_id=f"{topic}-1",
                    correlation_id="trace",
                    **options,
                )
            )
        await mailbox.send_message(NewMessage(topic="later", payload=b"", message_id="later-2"))
        await mailbox.send_message(NewMessage(topic="later", payload=b"", message_id="later-3"))
        await mailbox.cancel_messages(["later-2"], reason="it was paid")
        await mailbox.reschedule_messages(["later-3"], at=datetime(2100, 1, 1, tzinfo=UTC))
        await mailbox.pause_topic("paused")
        await mailbox.set_schedule("nightly", ScheduleSpec("reports", every_ms=YEAR_MS, payload=b"all"))
        await mailbox.run_schedule("nightly")
        job = await mailbox.start_redrive(RedriveSpec(topics=("orders",), destination="repair", limit=1))
        while (await mailbox.get_redrive(job.job_id)).status == "running":
            await asyncio.sleep(0.01)
        if "//" not in address:
            with closing(sqlite3.connect(address)) as connection, connection:
                MailboxOutbox().record(
                    connection, NewMessage(topic="recorded", payload=b"{}", message_id="recorded-1")
                )
            while not (await mailbox.get_backlog("recorded")).ready:
                await asyncio.sleep(0.01)
        receipts = {name: receipts[name] for name in held} | {copy.message_id: copy.receipt}
        return await state(mailbox) | {
            "receipts": {name: write_receipt(receipt) for name, receipt in receipts.items()},
            "answered": answered,
        }


async def state(mailbox: Mailbox) -> Facts:
    """Return every message with its history, and what else the mailbox stores."""
    backlog = await mailbox.get_backlog()
    ids = [f"order-{number}" for number in range(len(ORDERS))]
    ids += [f"{topic}-1" for topic in ("mail.a", "mail.b", "later", "paused", "unique")]
    ids += ["later-2", "later-3"]
    jobs = await mailbox.list_redrives()
    facts = {
        "messages": [await mailbox.get_message(id_) for id_ in ids],
        "stories": [(await mailbox.explain_message(id_)).story for id_ in ids],
        "dead": [(await mailbox.list_dead_letters(topic)).items for topic in ("orders", "audit", "repair")],
        "shards": sorted(
            (each.topic, each.shard, each.ready, each.in_flight, each.dead) for each in backlog.shards
        ),
        "paused": backlog.paused_topics,
        "settings": await mailbox.get_settings(),
        "jobs": [(each.job_id, each.status, each.matched, each.moved) for each in jobs],
        "copies": [(await mailbox.list_redrive_messages(each.job_id)).items for each in jobs],
        "subscriptions": [
            (each.name, each.topics, each.status) for each in await mailbox.list_subscriptions()
        ],
        "schedules": [
            (each.name, each.topic, each.runs, each.next_run) for each in await mailbox.list_schedules()
        ],
    }
    built: Facts = msgspec.json.decode(msgspec.json.encode(facts))
    return built


async def read(address: str, _: Facts) -> Facts:
    """Return what the mailbox stores."""
    async with connected(address) as mailbox:
        return await state(mailbox)


async def use(address: str, facts: Facts) -> Facts:
    """Settle what an earlier process holds, repeat its sends, and handle the rest; return the outcomes."""
    async with connected(address) as mailbox:
        receipts = [read_receipt(token) for token in facts["receipts"].values()]
        settled = await mailbox.ack_messages(receipts)
        sent = await mailbox.send_batch(ORDERS)
        outcome = await mailbox.wait_for_result(facts["answered"])
        redriven = await mailbox.redrive_dead_letters("orders")
        received = await mailbox.receive_messages(["orders", "mail.a", "unique"], max_messages=50)
        payloads = {message.message_id: message.payload for message in ORDERS}
        return {
            "settled": [str(each) for each in settled if each is not None],
            "new": [str(each) for each in sent if not getattr(each, "duplicate", False)],
            "result": outcome.payload.decode(),
            "redriven": redriven,
            "altered": [
                each.message_id
                for each in received
                if payloads.get(each.message_id, each.payload) != each.payload
            ],
            "received": sorted(each.message_id for each in received),
            "acked": sum(
                each is None for each in await mailbox.ack_messages([each.receipt for each in received])
            ),
        }


async def call(address: str, _: Facts) -> Facts:
    """Call every operation of the last release; return the error of each, or `works`."""
    async with connected(address) as mailbox:
        return await try_calls(mailbox)


async def try_calls(mailbox: Mailbox) -> Facts:
    """Call every operation of the last release; return the error of each, or `works`."""
    outcomes: Facts = {}

    async def attempt(name: str, calling: Callable[[], Awaitable[Any]]) -> Any:
        try:
            answer = await calling()
        except (PostroomError, AttributeError, TypeError) as error:
            outcomes[name] = f"{type(error).__name__}: {error}"
            return None
        refused = (
            next((each for each in answer if isinstance(each, Exception)), None)
            if isinstance(answer, list)
            else None
        )
        outcomes.setdefault(name, "works" if refused is None else str(refused))
        return answer

    async def deliver(topic: str, **options: Any) -> Any:
        await mailbox.send_message(NewMessage(topic=topic, payload=b'{"a": 1}'))
        return (await mailbox.receive_messages(topic, wait_ms=TIMEOUT_MS // 2, **options))[0]

    message = NewMessage(
        topic="calls", payload=b"{}", idem_key="once", attrs={"a": "b"}, sticky_key="ann", priority=7
    )
    sent = await attempt("send_message", lambda: mailbox.send_message(message))
    await attempt(
        "send_batch",
        lambda: mailbox.send_batch([NewMessage(topic="calls", payload=b"%d" % n) for n in range(3)]),
    )
    received = await attempt(
        "receive_messages", lambda: mailbox.receive_messages(["calls"], consumer="c", wait_ms=100)
    )
    await attempt("extend_visibility", lambda: mailbox.extend_visibility([received[0].receipt], 60_000))
    await attempt(
        "ack_messages",
        lambda: mailbox.ack_messages([received[0].receipt], results=[MessageResult(b"1", None)]),
    )
    await attempt("wait_for_result", lambda: mailbox.wait_for_result(sent.message_id, wait_ms=10))
    await attempt(
        "nack_messages", lambda: mailbox.nack_messages([received[1].receipt], reason="r", delay_ms=0)
    )
    dead = await deliver("dead")
    await mailbox.nack_messages([dead.receipt], reason="broken", action="reject", traceback="Traceback")
    await attempt("list_dead_letters", lambda: mailbox.list_dead_letters("dead"))
    spec = RedriveSpec(topics=("dead",))
    await attempt("preview_redrive", lambda: mailbox.preview_redrive(spec))
    job = await attempt("start_redrive", lambda: mailbox.start_redrive(spec))
    if job is not None:
        await attempt("get_redrive", lambda: mailbox.get_redrive(job.job_id))
        await attempt("list_redrive_messages", lambda: mailbox.list_redrive_messages(job.job_id))
        while (await mailbox.get_redrive(job.job_id)).status == "running":
            await asyncio.sleep(0.01)
        await attempt("change_redrive", lambda: mailbox.change_redrive(job.job_id, "undo"))
    await attempt("list_redrives", mailbox.list_redrives)
    await attempt("redrive_dead_letters", lambda: mailbox.redrive_dead_letters("dead"))
    await attempt("purge_topic", lambda: mailbox.purge_topic("dead", ready=True))
    waiting = await mailbox.send_message(NewMessage(topic="waiting", payload=b"", deliver_after_ms=60_000))
    await attempt(
        "reschedule_messages",
        lambda: mailbox.reschedule_messages([waiting.message_id], deliver_after_ms=90_000),
    )
    await attempt("cancel_messages", lambda: mailbox.cancel_messages([waiting.message_id], reason="r"))
    changes = SettingsChanges(limits={"result_bytes": 70_000}, topics={"c.*": {"max_attempts": 9}})
    await attempt("preview_settings", lambda: mailbox.preview_settings(changes))
    await attempt("set_settings", lambda: mailbox.set_settings(changes))
    await attempt("get_settings", mailbox.get_settings)
    await attempt("set_topic_policy", lambda: mailbox.set_topic_policy("calls", {"max_attempts": 4}))
    await attempt("get_topic_policy", lambda: mailbox.get_topic_policy("calls"))
    await attempt("pause_topic", lambda: mailbox.pause_topic("calls"))
    await attempt("resume_topic", lambda: mailbox.resume_topic("calls"))
    await attempt(
        "set_subscription", lambda: mailbox.set_subscription("copies", SubscriptionFilter(("c.*",)))
    )
    await attempt("list_subscriptions", mailbox.list_subscriptions)
    await attempt("rewind_subscription", lambda: mailbox.rewind_subscription("copies", 0))
    await attempt("delete_subscription", lambda: mailbox.delete_subscription("copies"))
    await attempt(
        "set_schedule", lambda: mailbox.set_schedule("tick", ScheduleSpec("ticks", every_ms=YEAR_MS))
    )
    await attempt("pause_schedule", lambda: mailbox.pause_schedule("tick"))
    await attempt("resume_schedule", lambda: mailbox.resume_schedule("tick"))
    await attempt("run_schedule", lambda: mailbox.run_schedule("tick"))
    await attempt("list_schedules", mailbox.list_schedules)
    await attempt("delete_schedule", lambda: mailbox.delete_schedule("tick"))
    await attempt("get_message", lambda: mailbox.get_message(sent.message_id))
    await attempt("explain_message", lambda: mailbox.explain_message(sent.message_id))
    await attempt("get_backlog", mailbox.get_backlog)
    await attempt("list_topics", mailbox.list_topics)
    await attempt("peek_messages", lambda: mailbox.peek_messages("calls"))
    await attempt("delete_old_events", lambda: mailbox.delete_old_events(1))

    async def stream() -> None:
        await mailbox.send_message(NewMessage(topic="stream", payload=b"{}"))
        async with mailbox.stream_messages("stream", wait_ms=TIMEOUT_MS // 2) as messages:
            async for each in messages:
                await each.ack()
                return

    await attempt("stream_messages", stream)
    return outcomes


async def record(address: str, facts: Facts) -> str:
    """Record a message in a database, from which the owner of the mailbox sends it; return its id."""
    import psycopg

    with psycopg.connect(address) as connection:
        message = NewMessage(topic=facts["topic"], payload=b"{}")
        (id_,) = MailboxOutbox().record(connection, message)
        return str(id_)


STEPS: dict[str, Callable[[str, Facts], Coroutine[None, None, Any]]] = {
    each.__name__: each for each in (write, read, use, call, record)
}


def main(step: str, address: str) -> None:
    """Print what a step returns, or the error by which Postroom refuses it."""
    try:
        print(json.dumps(asyncio.run(STEPS[step](address, json.load(sys.stdin)))))
    except PostroomError as error:
        sys.exit(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
