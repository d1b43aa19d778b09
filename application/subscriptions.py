"""Subscriptions: handlers that change and list them, and the worker that copies from the log to them."""

import asyncio
from datetime import datetime

import uuid_utils

from postroom.application.mailbox.administer import execute
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.owner_tasks import StepWorker
from postroom.application.mailbox.records import COPIES, TAIL, find_sent
from postroom.application.messages import rfc3339
from postroom.application.ports.event_log import VolatileLog
from postroom.application.queries.mailbox_past import to_us
from postroom.application.queries.measure_mailbox import (
    report_subscription,
    report_subscriptions,
    with_problem,
)
from postroom.application.query_results import Moment, check_moment
from postroom.application.reports import DeletionReport, RewindReport, SubscriptionReport
from postroom.application.telemetry import logger
from postroom.domain.arguments import check_optional_text, check_type
from postroom.domain.errors import InvalidRequest
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


class SubscriptionCopier(StepWorker):
    """Worker that copies messages of the log to subscriptions, and continues the work of an earlier owner.

    The progress is part of the state and is committed with the copies, so no message is missing or copied
    twice, whoever owns the mailbox next.
    """

    failure = "subscription.failed"

    def __init__(self, engine: MailboxEngine, batch: int = COPIES) -> None:
        """Take the engine, and the maximum number of messages that one commit copies or removes."""
        super().__init__(engine)
        self._batch = batch
        self._stalled: dict[str, tuple[int, int, int]] = {}
        """Of a topic without room: version of the subscription, size of the topic, and pauses since."""

    async def _run_once(self, *, is_changed: bool) -> float | None:
        """Advance each subscription by a step; return the seconds until the next, None without any."""
        subscriptions = list(self._engine.mailbox.subscriptions.values())
        if not subscriptions:
            return None
        pauses = [
            await self._attempt(self._step(each.name), subscription=each.name)
            for each in subscriptions
            if not each.is_live
        ]
        return min(pauses, default=LOOK_SECONDS)

    async def _step(self, name: str) -> float:
        """Advance a subscription; return the seconds until its next step."""
        subscription = self._engine.mailbox.subscriptions.get(name)
        if subscription is None:  # deleted meanwhile
            return 0
        if subscription.status == "clearing":
            return await self._clear(subscription)
        return await self._copy(subscription)

    async def _clear(self, subscription: Subscription) -> float:
        """Remove the messages of a topic; return the seconds until the next step."""
        name, messages = subscription.name, self._engine.mailbox.messages.values()
        streams = [each.stream for each in messages if each.topic == name]
        for start in range(0, max(1, len(streams)), self._batch):
            end = start + self._batch
            cleared, is_cleared = tuple(streams[start:end]), end >= len(streams)
            step = AdvanceSubscription(name, subscription.version, cleared=cleared, is_cleared=is_cleared)
            if not await execute(self._engine, step):
                return FULL_SECONDS
        return 0

    async def _copy(self, before: Subscription) -> float:
        """Copy the next messages of the log; return the seconds until the next step."""
        engine, name = self._engine, before.name
        version, former, pauses = self._stalled.pop(name, (0, 0, 0))
        if version == before.version and self._unsettled(name) >= former and pauses < LOOKS:
            self._stalled[name] = version, former, pauses + 1
            return FULL_SECONDS
        batch = await asyncio.to_thread(
            find_sent, engine.log, before.filter, before.position, messages=self._batch, positions=POSITIONS
        )
        step = AdvanceSubscription(
            name,
            before.version,
            sent=tuple(batch.sent),
            through=batch.through,
            altered=tuple(batch.altered),
            is_last=len(batch.sent) < self._batch and engine.mailbox.position - batch.through <= TAIL,
        )
        if not await execute(engine, step):
            self._stalled[name] = before.version, self._unsettled(name), 0
            return FULL_SECONDS
        after = engine.mailbox.subscriptions.get(name)
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

    def _unsettled(self, name: str) -> int:
        """Return the number of messages of a topic that count against its capacity."""
        topic = self._engine.mailbox.topics.get(name)
        return 0 if topic is None else topic.unsettled


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
        if_missing: bool = False,
        principal: str | None = None,
    ) -> SubscriptionReport:
        """Create a subscription, or change its filter; see `Mailbox.set_subscription`."""
        check_topic(name)
        check_filter(filter_)
        check_type("if_missing", if_missing, bool)
        check_optional_text("principal", principal)
        position = None if start is None else await self._position(start)
        stream = uuid_utils.uuid7().bytes
        await self._submit(SetSubscription(name, filter_, stream, position, principal, if_missing))
        mailbox = self._engine.mailbox
        return report_subscription(find_subscription(name, mailbox), mailbox)

    async def list_subscriptions(self) -> list[SubscriptionReport]:
        """Return the subscriptions; see `Mailbox.list_subscriptions`."""
        await self._engine.check_ownership()
        reports, log = report_subscriptions(self._engine.mailbox), self._engine.log
        if all(each.status == "live" for each in reports):
            return reports
        return await asyncio.to_thread(lambda: [with_problem(each, log) for each in reports])

    async def rewind_subscription(
        self, name: str, start: Moment, /, *, dry_run: bool = False, principal: str | None = None
    ) -> RewindReport:
        """Copy the messages sent after a moment again; see `Mailbox.rewind_subscription`."""
        check_topic(name)
        check_type("dry_run", dry_run, bool)
        check_optional_text("principal", principal)
        await self._engine.check_ownership()
        mailbox = self._engine.mailbox
        filter_, log = find_subscription(name, mailbox).filter, self._engine.log
        position = check_start(await self._position(start), mailbox)
        copied = await asyncio.to_thread(
            lambda: sum(
                isinstance(event, MessageSent) and filter_.covers(event) for _, event in log.replay(position)
            )
        )
        topic = mailbox.topics.get(name)
        removed = 0 if topic is None else topic.size
        if not dry_run:
            await self._submit(RewindSubscription(name, position, principal))
        return RewindReport(name, position, removed, copied)

    async def delete_subscription(
        self, name: str, /, *, dry_run: bool = False, principal: str | None = None
    ) -> DeletionReport:
        """Delete a subscription; see `Mailbox.delete_subscription`."""
        check_topic(name)
        check_type("dry_run", dry_run, bool)
        check_optional_text("principal", principal)
        await self._engine.check_ownership()
        subscription = find_subscription(name, self._engine.mailbox)
        if not dry_run:
            await self._submit(DeleteSubscription(name, principal))
        report = report_subscription(subscription, self._engine.mailbox)
        counts = (report.ready, report.in_flight, report.dead)
        return DeletionReport(name, sum(counts), *counts, report.behind)

    async def _submit(self, command: SubscriptionCommand) -> None:
        await execute(self._engine, command)
        self.run_copier()

    async def _position(self, start: Moment) -> int:
        """Return the position of the log after which messages are sent since a moment."""
        check_moment(start, "start")
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
