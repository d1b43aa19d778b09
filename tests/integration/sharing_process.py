"""A process that shares a mailbox by `connect` and makes the calls that its standard input names.

    python -m tests.integration.sharing_process

Each line of the input is the JSON list `[name, argument, ...]` of a method of `Calls`; each line of the
output is the JSON of its answer. An error is answered by the name of its class.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from postroom import (
    Mailbox,
    MailboxLimits,
    NewMessage,
    PostroomError,
    SubscriptionFilter,
    TopicPolicy,
    connect,
)
from postroom.application.messages import read_receipt, write_receipt

OWNER_TIMEOUT_MS = 500
TIMEOUT_MS = 120_000
Answer = Any
Facts = Mapping[str, Any]


class Calls:
    """Calls of a mailbox whose arguments and answers are JSON."""

    def __init__(self) -> None:
        self._opened = AsyncExitStack()
        self._mailbox: Mailbox | None = None

    @property
    def mailbox(self) -> Mailbox:
        assert self._mailbox is not None
        return self._mailbox

    async def open(self, store: str, policy: Facts | None, limits: Facts | None) -> Answer:
        """Connect with these fields of policy and limits, or none."""
        connection = connect(
            store,
            timeout_ms=TIMEOUT_MS,
            owner_timeout_ms=OWNER_TIMEOUT_MS,
            default_policy=None if policy is None else TopicPolicy(**policy),
            limits=None if limits is None else MailboxLimits(**limits),
        )
        self._mailbox = await self._opened.enter_async_context(connection)
        return "open"

    async def close(self) -> Answer:
        await self._opened.aclose()
        self._mailbox = None
        return "closed"

    async def send(self, topic: str, payload: str, fields: Facts) -> Answer:
        message = NewMessage(topic=topic, payload=payload.encode(), **fields)
        sent = await self.mailbox.send_message(message)
        return ["sent", sent.duplicate]

    async def set_policy(self, topic: str, policy: Facts) -> Answer:
        return await self.mailbox.set_topic_policy(topic, policy)

    async def subscribe(self, name: str, topic: str) -> Answer:
        await self.mailbox.set_subscription(name, SubscriptionFilter((topic,)))
        return "subscribed"

    async def cancel(self, message_id: str) -> Answer:
        return [change.outcome for change in await self.mailbox.cancel_messages([message_id])]

    async def receive(self, topic: str, count: int) -> Answer:
        """Return payload, attempt and receipt of each message, and whether the owner changed meanwhile."""
        epoch = (await self.mailbox.get_backlog()).epoch
        received = await self.mailbox.receive_messages(topic, max_messages=count)
        messages = [[each.payload.decode(), each.attempt, write_receipt(each.receipt)] for each in received]
        return [messages, epoch != (await self.mailbox.get_backlog()).epoch]

    async def ack(self, receipt: str) -> Answer:
        return _name((await self.mailbox.ack_messages([read_receipt(receipt)]))[0])

    async def nack(self, receipt: str) -> Answer:
        return _name((await self.mailbox.nack_messages([read_receipt(receipt)], reason="no", delay_ms=0))[0])

    async def backlog(self) -> Answer:
        """Return the counts of each shard."""
        shards = (await self.mailbox.get_backlog()).shards
        return sorted([s.topic, s.shard, s.ready, s.delayed, s.in_flight] for s in shards)

    async def owner(self) -> Answer:
        return (await self.mailbox.get_backlog()).owner

    async def dead_letters(self, topic: str) -> Answer:
        """Return the attempts and reasons of the dead letters, oldest first."""
        return [[each.attempt, each.reason] for each in (await self.mailbox.list_dead_letters(topic)).items]

    async def redrive(self, topic: str) -> Answer:
        return await self.mailbox.redrive_dead_letters(topic)

    async def make(self, name: str, *arguments: Any) -> Answer:
        """Make the call of this name; its error is an answer, too."""
        try:
            return await getattr(self, name)(*arguments)
        except PostroomError as error:
            return type(error).__name__


def _name(refusal: Exception | None) -> str | None:
    return None if refusal is None else type(refusal).__name__


async def main() -> None:
    calls = Calls()
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await calls.make(*json.loads(line))), flush=True)
    await calls.close()


if __name__ == "__main__":
    asyncio.run(main())
