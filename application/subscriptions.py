"""Subscriptions: handlers that change and list them, and the worker that copies from the log to them."""

import asyncio
from collections.abc import Sequence
from datetime import datetime

import uuid_utils

from postroom.application.mailbox.command_enricher import COPIES, TAIL, covers_sent, find_sent
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import VolatileLog
from postroom.application.queries.mailbox_past import to_us
from postroom.application.queries.measure_mailbox import report_subscription
from postroom.application.query_results import Moment, RewindReport, SubscriptionReport, check_moment
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import wait_at_most
from postroom.domain.arguments import check_optional_text, check_type
from postroom.domain.errors import InvalidRequest, PostroomError, Rejected
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.subscription_decisions import check_start, find_subscription
from postroom.domain.message import MessageSent
from postroom.domain.names import check_topic
from postroom.domain.subscription import (
    AdvanceSubscription,
    DeleteSubscription,
    RewindSubscription,
    SetSubscription,
    Subscription,
    SubscriptionCommand,
    SubscriptionFilter,
    check_filter,
)

POSITIONS = 100_000
"""Positions of the log that are read between two commits, at most."""
LOOK_SECONDS = 1.0
"""Interval at which live subscriptions are checked for one that lacks room and copies from the log."""
FULL_SECONDS = 0.25
"""Pause of a subscription that copies while its topic has no room."""
LOOKS = 20
"""Pauses after which the log is read again although its topic has not changed, as its policy may have."""
RETRY_SECONDS = 1.0
"""Pause after a failure."""


class SubscriptionCopier:
    """Worker that gives subscriptions their copies from the log, also those of an earlier owner.

    Their progress is part of the state and is committed with the copies, so no message is missing or copied
    twice, whoever owns the mailbox next.
    """

    def __init__(self, engine: MailboxEngine, batch: int = COPIES) -> None:
        """Take the engine, and the maximum number of messages that one commit copies or removes."""
        self._engine = engine
        self._batch = batch
        self._changed = asyncio.Event()
        self._stalled: dict[str, tuple[int, int, int]] = {}
        """Of a topic without room: version of the subscription, size of the topic, and pauses since."""

    def wake(self) -> None:
        """Check the subscriptions now, as one of them has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Advance the subscriptions that are not live, in turns, until cancelled."""
        while True:
            self._changed.clear()
            pause = await self._run_once()
            if pause is None:
                await self._changed.wait()
            elif pause > 0:
                await wait_at_most(pause, self._changed.wait())
            else:
                await asyncio.sleep(0)

    async def _run_once(self) -> float | None:
        """Advance each subscription by a step; return the seconds until the next, None without any."""
        try:
            subscriptions = list(self._engine.mailbox.subscriptions.values())
        except PostroomError as error:
            logger().warning("subscription.failed", mailbox=self._engine.name, error=str(error))
            return RETRY_SECONDS
        if not subscriptions:
            return None
        pauses = [await self._attempt(each) for each in subscriptions if not each.is_live]
        return min(pauses, default=LOOK_SECONDS)

    async def _attempt(self, subscription: Subscription) -> float:
        """Run a step of a subscription, and log its failure, so that others continue."""
        names = {"mailbox": self._engine.name, "subscription": subscription.name}
        try:
            return await self._step(subscription)
        except PostroomError as error:
            logger().warning("subscription.failed", **names, error=str(error))
        except Exception as error:
            logger().exception("subscription.failed", **names, error=summarize(error))
        return RETRY_SECONDS

    async def _step(self, subscription: Subscription) -> float:
        """Remove or copy messages; return the seconds until the next step."""
        engine, name = self._engine, subscription.name
        before = engine.mailbox.subscriptions.get(name)
        if before is None:
            return 0
        if before.status == "clearing":
            command = await self._next_cleared(before)
        else:
            size = _size_of(engine.mailbox, name)
            version, former, pauses = self._stalled.pop(name, (0, 0, 0))
            if version == before.version and size >= former and pauses < LOOKS:
                self._stalled[name] = version, former, pauses + 1
                return FULL_SECONDS
            covers = covers_sent(engine.mailbox, name)
            batch = await asyncio.to_thread(
                find_sent, engine.log, covers, before.position, messages=self._batch, positions=POSITIONS
            )
            command = AdvanceSubscription(
                name,
                before.version,
                sent=tuple(batch.sent),
                through=batch.through,
                altered=tuple(batch.altered),
                is_last=len(batch.sent) < self._batch and engine.mailbox.position - batch.through <= TAIL,
            )
        await submit(engine, command)
        after = engine.mailbox.subscriptions.get(name)
        if after is None or after.version != before.version:
            if after is not None and after.skipped > before.skipped:
                logger().error(
                    "subscription.altered_messages",
                    mailbox=engine.name,
                    subscription=name,
                    after=before.position,
                    through=after.position,
                    messages=after.skipped - before.skipped,
                )
            return 0
        if before.status == "copying":
            self._stalled[name] = before.version, _size_of(engine.mailbox, name), 0
        return FULL_SECONDS

    async def _next_cleared(self, subscription: Subscription) -> AdvanceSubscription:
        """Return the command that removes the next messages of a topic."""
        streams = streams_of(self._engine.mailbox, subscription.name)
        cleared = tuple(streams[: self._batch])
        for start in range(self._batch, len(streams), self._batch):  # all but the last ones, which it returns
            some = AdvanceSubscription(subscription.name, subscription.version, cleared=cleared)
            await submit(self._engine, some)
            cleared = tuple(streams[start : start + self._batch])
        return AdvanceSubscription(subscription.name, subscription.version, cleared=cleared, is_cleared=True)


class Subscriptions:
    """The handlers of subscriptions, for the owner."""

    _engine: MailboxEngine
    _copier: SubscriptionCopier | None = None

    def run_copier(self) -> None:
        """Run the worker that copies until the engine is closed, or have it check the subscriptions now."""
        if self._copier is None:
            self._copier = SubscriptionCopier(self._engine)
            self._engine.tasks.append(asyncio.create_task(self._copier.run(), name="subscriptions"))
        self._copier.wake()

    async def set_subscription(
        self,
        name: str,
        filter_: SubscriptionFilter,
        /,
        *,
        start: Moment | None = None,
        principal: str | None = None,
    ) -> SubscriptionReport:
        """Create a subscription, or change its filter; see `Mailbox.set_subscription`."""
        check_topic(name)
        check_filter(filter_)
        check_optional_text("principal", principal)
        position = None if start is None else await self._position(start)
        stream = uuid_utils.uuid7().bytes
        await self._submit(SetSubscription(name, filter_, stream, position, principal))
        mailbox = self._engine.mailbox
        return report_subscription(find_subscription(name, mailbox), mailbox)

    async def list_subscriptions(self) -> list[SubscriptionReport]:
        """Return the subscriptions; see `Mailbox.list_subscriptions`."""
        await self._engine.check_ownership()
        mailbox = self._engine.mailbox
        return [report_subscription(each, mailbox) for _, each in sorted(mailbox.subscriptions.items())]

    async def rewind_subscription(
        self, name: str, start: Moment, /, *, dry_run: bool = False, principal: str | None = None
    ) -> RewindReport:
        """Copy what was sent after a moment again; see `Mailbox.rewind_subscription`."""
        check_topic(name)
        check_type("dry_run", dry_run, bool)
        check_optional_text("principal", principal)
        await self._engine.check_ownership()
        mailbox = self._engine.mailbox
        find_subscription(name, mailbox)
        position = check_start(await self._position(start), mailbox)
        covers, log = covers_sent(mailbox, name), self._engine.log
        copied = await asyncio.to_thread(
            lambda: sum(type(event) is MessageSent and covers(event) for _, event in log.replay(position))
        )
        removed = len(streams_of(self._engine.mailbox, name))
        if not dry_run:
            await self._submit(RewindSubscription(name, position, principal))
        return RewindReport(name, position, removed, copied)

    async def delete_subscription(self, name: str, /, *, principal: str | None = None) -> int:
        """Delete a subscription; see `Mailbox.delete_subscription`."""
        check_topic(name)
        check_optional_text("principal", principal)
        await self._submit(DeleteSubscription(name, principal))
        return len(streams_of(self._engine.mailbox, name))

    async def _submit(self, command: SubscriptionCommand) -> None:
        await submit(self._engine, command)
        self.run_copier()

    async def _position(self, start: Moment) -> int:
        """Return the position of the log after which messages are sent since a moment."""
        check_moment(start)
        engine = self._engine
        if VolatileLog in type(engine.log).__mro__:
            raise InvalidRequest(
                f"Mailbox {engine.name} has no history, as it is in memory; leave start out."
            )
        if not isinstance(start, datetime):
            return start
        time = to_us(start)
        if time > engine.now():
            raise InvalidRequest(f"{rfc3339(time)} is in the future; pass a time in the past.")
        return await asyncio.to_thread(engine.log.position_before, time)


def _size_of(mailbox: Mailbox, topic: str) -> int:
    """Return the number of messages of a topic that count against its capacity."""
    queue = mailbox.topics.get(topic)
    return 0 if queue is None else sum(shard.size for shard in queue.shards.values())


async def submit(engine: MailboxEngine, command: SubscriptionCommand) -> None:
    """Submit a command to the engine; raise its refusal."""
    (answer,) = await engine.submit([command])
    if isinstance(answer, Rejected):
        raise answer


def streams_of(mailbox: Mailbox, topic: str) -> Sequence[bytes]:
    """Return the streams of the messages in a topic, in the order of their positions."""
    return [each.stream for each in mailbox.messages.values() if each.topic == topic]
