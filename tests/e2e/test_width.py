"""Output for people fits 80 columns, however long the values are; only longer ids exceed them."""

import asyncio
import re

from msgspec.structs import replace
from rich.cells import cell_len

from postroom.adapters.cli.values import DIFFERS
from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_audit_log
from postroom.adapters.compose.store import open_store
from postroom.application.access.audit import ALLOWED, AuditEntry
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.settings import SettingsChanges
from postroom.domain.subscription import SubscriptionFilter
from tests.e2e.conftest import Postroom
from tests.projections.histories import build_without_spark

LONG = 255
COLUMNS = 80
SECONDS = 60
ARCHIVE = "a" * 100 + "/" + "b" * 100
MAILBOX = f"{'m' * 60}@{'p' * 60}"
TOPIC = "orders." + "t" * (LONG - 7)
SUBSCRIPTION = "subscription." + "s" * 200
PAUSED = TOPIC[:-1] + "u"
READY, DEAD, WIDE = "order-" + "7" * (LONG - 6), "order-" + "8" * (LONG - 6), "日" * LONG
IDS = {READY, DEAD, WIDE, "c" * LONG}
URL = f"https://example.com/{'path/' * 60}?{'q' * 100}"
ERROR = f"the payment provider at {URL} answered 503 Service Unavailable " * 3
SETTINGS = f"""
mailbox = "{MAILBOX}"

[archive]
folder = "{ARCHIVE}"
"""
TOPICS = f"""
[topics."{TOPIC[:-1]}*"]
max_attempts = 7
backoff_max = "2m"
"""
STREAMS = f"""
[nats]
url = "nats://{"n" * 200}.example.com:4222"

[streams.{"S" * 200}]
subjects = ["{"s" * 200}"]
"""
COMMANDS = [
    "topic list",
    "topic policy {topic}",
    "subscription list",
    "subscription show {subscription}",
    "schedule list",
    "schedule show {schedule}",
    "mailbox list",
    "mailbox show",
    "backlog",
    "peek {topic}",
    "recv {topic}",
    "show {ready}",
    "show {dead}",
    "show --why {dead}",
    "dlq list",
    "dlq list --held-keys",
    "dlq groups",
    "dlq show {dead}",
    "search",
    "redrive list",
    "redrive show {job}",
    "redrive show {job} --messages",
    "audit",
    "token list",
    "token inspect --token-file token",
    "segments build",
    "segments list",
    "segments compact",
    "segments verify",
    "log show",
    "log tail",
    "config show",
    "apply --dry-run",
    "activity",
    "views status",
]


async def _fill(store: str, archive: str) -> None:
    """Fill a store with names, ids and texts that are all long."""
    policy = TopicPolicy(max_attempts=1)
    async with open_mailbox(store, MAILBOX, default_policy=policy, archive=archive) as mailbox:
        await mailbox.set_topic_policy(TOPIC, {"ordered_keys": True, "dead_letters_hold_keys": True})
        for id_ in (DEAD, WIDE, READY):
            message = NewMessage(
                topic=TOPIC,
                payload=b"{}",
                message_id=id_,
                idem_key=id_[-1] * 200,
                sticky_key=id_[-1] * LONG,
                principal="p" * LONG,
                correlation_id="c" * LONG,
                trace_id="d" * 32,
                content_type="application/" + "j" * 200,
                schema_url=URL[:LONG],
                attrs={"n" * 200: "v" * 300, "url": URL},
            )
            await mailbox.send_message(message)
            if id_ != READY:
                (received,) = await mailbox.receive_messages(TOPIC, consumer="c" * LONG)
                await mailbox.nack_messages([received.receipt], reason=ERROR)
        await mailbox.send_message(NewMessage(topic="settled", payload=b"{}"))
        (received,) = await mailbox.receive_messages("settled")
        await mailbox.ack_messages([received.receipt])
        await mailbox.send_message(NewMessage(topic=PAUSED, payload=b"{}"))
        await mailbox.pause_topic(PAUSED)
        for headers in ({}, {"h" * LONG: "v" * LONG}):
            await mailbox.set_subscription(
                SUBSCRIPTION + "x" * len(headers), SubscriptionFilter((TOPIC, "*"), headers)
            )
        spec = ScheduleSpec(
            TOPIC, "0 3 * * *", "America/Argentina/ComodRivadavia", headers={"h" * LONG: "v" * LONG}
        )
        await mailbox.set_schedule(SUBSCRIPTION, spec)
        changes = SettingsChanges({"history_retention_ms": 1}, {}, {TOPIC[:-2] + "*": {"max_attempts": 3}})
        await mailbox.set_settings(changes)
        async with asyncio.timeout(SECONDS):
            while not await mailbox.retention.enforce_age():
                pass


async def _audit(store: str) -> None:
    entry = AuditEntry(1, "p" * LONG, "0" * 32, "read-payload", MAILBOX, (TOPIC,), "", 1, ALLOWED, "c")
    async with open_audit_log(open_store(store)) as audit:
        await audit.record([entry, replace(entry, target=DEAD, outcome="E_CAP_SCOPE")])


def test_output_fits_the_terminal_but_for_longer_ids(postroom: Postroom) -> None:
    settings = postroom.folder / "postroom.toml"
    settings.write_text(SETTINGS)
    asyncio.run(_fill(str(postroom.store), str(postroom.folder / ARCHIVE)))
    build_without_spark(postroom.store)
    asyncio.run(_audit(str(postroom.store)))
    postroom.ok("token", "rotate")
    postroom.ok("token", "mint", "p" * LONG, "--operation", "send,recv", "--topic", TOPIC, "--out", "token")
    started = postroom.ok("redrive", "start", "--topic", TOPIC, "--id", WIDE, "--yes", "--json")
    values = {"topic": TOPIC, "ready": READY, "dead": DEAD, "job": started.json["job_id"]}
    values |= {"subscription": SUBSCRIPTION + "x", "schedule": SUBSCRIPTION}

    for command in COMMANDS:
        if command in {"config show", "apply --dry-run"}:
            settings.write_text(SETTINGS + TOPICS + (STREAMS if command == "config show" else ""))
        done = postroom(*(word.format(**values) for word in command.split()), COLUMNS=f"{COLUMNS}")
        assert done.code in (0, DIFFERS), (command, done)
        assert done.out, command
        for line in done.out.splitlines():
            assert cell_len(line) <= COLUMNS or line in IDS, (command, line)
        for id_ in re.findall(r"{(ready|dead)}", command):
            assert values[id_] in done.out.splitlines(), command
