"""Make the store of a version of Postroom, to be kept as a fixture.

    PYTHONPATH=CHECKOUT python make_store.py STORE

runs with the version in CHECKOUT; STORE is the path of a new SQLite file, or the URL of a database that this
version has migrated. Freeze a store whenever `FORMAT` grows, before the version that reads the new format is
merged, and never again:

    xz -9 STORE                                                              as format-N.db.xz
    pg_dump --schema=postroom --no-owner --no-privileges --inserts URL | xz  as format-N.sql.xz

`format-N.txt` has the fields of the events, or their number where they are stored without names.
"""

import asyncio
import sys
from typing import Any

from postroom.adapters.compose import open_mailbox
from postroom.application.messages import NewMessage
from postroom.domain.policy import TopicPolicy

YEARS_MS = 8 * 365 * 24 * 3_600_000
POLICY = TopicPolicy(
    shards=2,
    max_attempts=1,
    visibility_ms=3_600_000,
    replay_window_ms=YEARS_MS,
    ready_retention_ms=YEARS_MS,
    dead_retention_ms=YEARS_MS,
)
MESSAGES = [
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


async def main(store: str) -> None:
    async with open_mailbox(store, "main@local", owner="frozen") as mailbox:
        await mailbox.set_topic_policy("orders", POLICY)
        for message in MESSAGES:
            await mailbox.send_message(message)
        received = await mailbox.receive_messages("orders", max_messages=5)
        await mailbox.ack_messages([each.receipt for each in received[:2]])
        await mailbox.nack_messages([received[2].receipt, received[3].receipt], reason="no such customer")
        redrive: Any = getattr(mailbox, "redrive_dead_letters", None) or mailbox.reprocess_dead_letters  # type: ignore[attr-defined]
        await redrive("orders", limit=1)
    async with open_mailbox(store, "main@local", owner="frozen") as mailbox:  # a second epoch
        await mailbox.set_topic_policy("invoices", POLICY)
        await mailbox.send_message(NewMessage(topic="invoices", payload=b"\x00\xff", correlation_id="trace"))
    async with open_mailbox(store, "archive@local", mode="archive", owner="frozen") as mailbox:
        await mailbox.send_batch([NewMessage(topic="past", payload=b"%d" % number) for number in range(3)])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
