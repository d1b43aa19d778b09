"""Consumers of a worker: a handler with its options, and the topics that it receives from."""

import asyncio
import random
import shlex
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.application.telemetry import logger
from postroom.application.threads import wait_at_most
from postroom.application.workers.handler import Handler, Middleware
from postroom.application.workers.retry import Retry
from postroom.domain.errors import Forbidden, InvalidRequest
from postroom.domain.settings import DEFAULT, explain_policy
from postroom.domain.subscription import SubscriptionFilter


class Consumer(NamedTuple):
    """A handler and the topics that it consumes; times in ms.

    Arguments:
        topic: name of a topic, or a pattern.
        timeout_ms: time limit of the handler; None for none.
        has_results: whether messages are acked with what the handler returns.
        subscription: filter of the subscription, if the topic is a subscription's.
        retry: how failed deliveries are retried.
        batch: maximum number of messages of one call; a handler of batches gets lists.
        ordered_keys: whether the topic must have this policy.
    """

    topic: str
    is_pattern: bool
    handler: Handler
    middlewares: tuple[Middleware, ...]
    concurrency: int
    timeout_ms: int | None
    visibility_ms: int
    has_results: bool = False
    subscription: SubscriptionFilter | None = None
    retry: Retry = Retry()
    batch: int = 1
    ordered_keys: bool = False


REFRESH_SECONDS = 1.0
REFRESH_SHARE = 20
"""A refresh may take up to 1/20 of the time, as counting a long backlog takes the mailbox long."""
MAX_SEEN = 10_000
"""Number of topics above which those without unsettled messages are forgotten."""
MAX_TOPICS = 1_000
"""Maximum number of topics of one receive."""


class Topics:
    """Topics by consumer: those seen so far with unsettled messages, for a consumer of a pattern.

    Arguments:
        consumer_of: returns the consumer of a topic, if any.
    """

    def __init__(self, mailbox: Mailbox, consumer_of: Callable[[str], Consumer | None]) -> None:
        self._mailbox = mailbox
        self._consumer_of = consumer_of
        self._by_pattern: dict[str, dict[str, None]] = {}
        self._seen: set[str] = set()
        self._refresh_at = 0.0
        self._lock = asyncio.Lock()

    async def of(self, consumer: Consumer) -> list[str]:
        """Return the topics to receive from; at most 1,000, a random choice of more.

        Raises: Unavailable when the mailbox can't be used.
        """
        if not consumer.is_pattern:
            return [consumer.topic]
        async with self._lock:
            await self._refresh()
        topics = list(self._by_pattern.get(consumer.topic, ()))
        return topics if len(topics) <= MAX_TOPICS else random.sample(topics, MAX_TOPICS)

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        start = loop.time()
        if start < self._refresh_at:
            return
        backlog = await self._mailbox.get_backlog()
        if len(self._seen) > MAX_SEEN:
            self._seen.clear()
            self._by_pattern.clear()
        for topic in {shard.topic for shard in backlog.shards} - self._seen:
            self._seen.add(topic)
            if (consumer := self._consumer_of(topic)) is not None:
                self._by_pattern.setdefault(consumer.topic, {})[topic] = None
        now = loop.time()
        self._refresh_at = now + max(REFRESH_SECONDS, (now - start) * REFRESH_SHARE)


async def prepare(worker: str, mailbox: Mailbox, consumers: Collection[Consumer]) -> None:
    """Give a mailbox the subscriptions and policies that the consumers of a worker need.

    Raises: InvalidRequest if a subscription or a section of the settings says otherwise, Forbidden if the
        token of the worker may not add what is missing.
    """
    filters = {each.topic: each.subscription for each in consumers if each.subscription is not None}
    if filters:
        await _subscribe(worker, mailbox, filters)
    if ordered := [each.topic for each in consumers if each.ordered_keys]:
        await _order_keys(worker, mailbox, ordered)


async def _subscribe(worker: str, mailbox: Mailbox, filters: Mapping[str, SubscriptionFilter]) -> None:
    """Create the subscriptions that the mailbox lacks; raise InvalidRequest if one has another filter."""
    existing = {each.name: each for each in await mailbox.list_subscriptions()}
    for name, filter_ in filters.items():
        options = [f"--header {shlex.quote(f'{key}={value}')}" for key, value in filter_.headers.items()]
        command = " ".join(
            ["postroom subscription set", *map(shlex.quote, (name, *filter_.topics)), *options]
        )
        if is_new := (report := existing.get(name)) is None:
            try:
                report = await mailbox.set_subscription(name, filter_, if_missing=True)
            except Forbidden as error:
                raise Forbidden(
                    f"Mailbox {mailbox.name} has no subscription {name}, and the token of worker {worker} "
                    f"lacks `admin` of the whole mailbox to create it; create it with `{command}`.",
                    error.reason,
                ) from error
        if {*report.topics} != {*filter_.topics} or report.headers != filter_.headers:
            raise InvalidRequest(
                f"Subscription {name} of mailbox {mailbox.name} gets messages of {report.filter.describe()}, "
                f"but worker {worker} names {filter_.describe()}; correct the worker, or change the "
                f"subscription with `{command}`."
            )
        if is_new:
            logger().info("worker.subscription_created", subscription=name, topics=list(filter_.topics))


async def _order_keys(worker: str, mailbox: Mailbox, topics: Sequence[str]) -> None:
    """Set the policy `ordered_keys` of topics."""
    try:
        refusing = await enable_policy(mailbox, topics, "ordered_keys")
    except Forbidden as error:
        raise Forbidden(
            f"The token of worker {worker} lacks `admin` of mailbox {mailbox.name} to set ordered_keys; "
            "leave it out of the consumer, and run "
            f"`postroom topic policy {shlex.quote(topics[0])} ordered_keys=true`.",
            error.reason,
        ) from error
    for topic, section in refusing.items():
        raise InvalidRequest(
            f"Section {section} of the settings of mailbox {mailbox.name} sets ordered_keys to "
            f"false, but worker {worker} handles topic {topic} with ordered_keys; change either."
        )


async def enable_policy(mailbox: Mailbox, topics: Sequence[str], field: str) -> dict[str, str]:
    """Set a field of the policy of topics to true, unless a section of the settings sets it to false.

    Returns: by topic, the section that does.
    Raises: Forbidden when the token may not read or change settings.
    """
    settings, refusing = await mailbox.get_settings(), {}
    for topic in topics:
        value, section = explain_policy(settings, topic)[field]
        if value:
            continue
        if section == DEFAULT:
            await mailbox.set_topic_policy(topic, {field: True})
            logger().info("worker.policy_set", topic=topic, field=field)
        else:
            refusing[topic] = section
    return refusing


LOOK_SECONDS = 0.05
"""Pause of a run without messages that ends with the others, while they handle theirs."""


def group_by_key(messages: Sequence[ReceivedMessage]) -> list[deque[ReceivedMessage]]:
    """Return a group for each ordered key, to be handled in order, and one for each other message."""
    groups: dict[object, deque[ReceivedMessage]] = {}
    for message in messages:
        name = message.receipt if message.ordered_key is None else (message.topic, message.ordered_key)
        groups.setdefault(name, deque()).append(message)
    return list(groups.values())


class Once:
    """Common end of runs, when no message is ready for any of them: handlers of one may send to others.

    Arguments:
        count: number of the runs.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: set[object] = set()
        self.is_over = asyncio.Event()

    def look_again(self) -> None:
        """Have all runs receive again, as one of them has handled messages."""
        self._idle.clear()

    async def wait_for_others(self, run: object) -> None:
        """Note that a run received nothing, and return when it should receive again, or all are over."""
        self._idle.add(run)
        if len(self._idle) == self._count:
            self.is_over.set()
        await wait_at_most(LOOK_SECONDS, self.is_over.wait())
