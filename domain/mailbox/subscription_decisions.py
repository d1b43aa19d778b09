"""Decisions of subscriptions: their changes, and the copies that they get (ADR 0119)."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from postroom.domain.envelope.build import OpenedEnvelope, open_envelope
from postroom.domain.errors import InvalidRequest, NotFound, Saturated
from postroom.domain.integrity import hash_chain
from postroom.domain.mailbox.state import Mailbox, shard_of
from postroom.domain.message import MS, Message, MessageSent
from postroom.domain.message_decider import expire
from postroom.domain.names import copy_stream, describe_choices, message_id
from postroom.domain.policy import SATURATED_RETRY_MS
from postroom.domain.record import Event
from postroom.domain.subscription import (
    MAX_SUBSCRIPTIONS,
    AdvanceSubscription,
    DeleteSubscription,
    RewindSubscription,
    SetSubscription,
    Subscription,
    SubscriptionAdvanced,
    SubscriptionCommand,
    SubscriptionDeleted,
    SubscriptionRewound,
    SubscriptionSet,
    SubscriptionStatus,
)

SENDS_SHARE = 10
"""A subscription that copies from the log leaves a tenth of the capacity of each shard to sends."""


def decide_subscription(command: SubscriptionCommand, mailbox: Mailbox, now: int) -> Sequence[Event]:
    """Return the events that a command of a subscription causes; see `postroom.domain.mailbox.decide`.

    Raises: a `Rejected` when the command is refused.
    """
    return _DECIDE[type(command)](command, mailbox, now)


def unknown_subscription(name: str, mailbox: str, choices: Collection[str]) -> NotFound:
    """Return the error for a subscription that a mailbox does not have; `choices` are those it has."""
    return NotFound(f"Mailbox {mailbox} has no subscription {name}; {describe_choices(name, choices)}")


def find_subscription(name: str, mailbox: Mailbox) -> Subscription:
    """Return a subscription of the mailbox, or raise NotFound."""
    if (subscription := mailbox.subscriptions.get(name)) is None:
        raise unknown_subscription(name, mailbox.name, mailbox.subscriptions)
    return subscription


def queue_taken(topic: str) -> InvalidRequest:
    """Return the refusal of a subscription whose topic holds messages."""
    return InvalidRequest(
        f"Topic {topic} holds messages, so it can't be the queue of a subscription; receive or purge them "
        "first, or choose another name."
    )


def refuse_send(topic: str, mailbox: Mailbox) -> None:
    """Raise InvalidRequest for a send to the topic of a subscription, whose messages are copies."""
    if topic in mailbox.subscriptions:
        raise InvalidRequest(
            f"Topic {topic} is the queue of subscription {topic}, which gets copies only; send to a topic of "
            "its filter."
        )


def fan_out(sent: Sequence[MessageSent], mailbox: Mailbox, now: int) -> list[Event]:
    """Return the events that give live subscriptions their copies of messages that are sent now.

    A subscription whose queue lacks the room gets none of them: from then on it copies from the log, so that
    neither the sender is refused nor a message is missing.
    """
    opened: dict[bytes, OpenedEnvelope] = {}
    events: list[Event] = []
    copies: dict[str, list[MessageSent]] = {}
    for each in sent:
        for subscription in mailbox.subscriptions_of(each.topic):
            if subscription.is_live and subscription.filter.covers_headers(each.headers):
                copies.setdefault(subscription.name, []).append(each)
    for name, some in copies.items():
        subscription = mailbox.subscriptions[name]
        queue = _Queue(subscription, mailbox, now)
        if all(queue.add(each, opened) for each in some):
            events += queue.events
        else:
            events.append(_advance(subscription, "copying", mailbox.position, now))
    return events


class _Queue:
    """The topic of a subscription, and the events that add copies to it."""

    def __init__(self, subscription: Subscription, mailbox: Mailbox, now: int, share: int = 0) -> None:
        """Take the subscription, and the share of the capacity, as a divisor, that is left to others."""
        self._subscription = subscription
        self._topic = mailbox.topics.get(subscription.name)
        self._policy = mailbox.policy(subscription.name)
        self._now = now
        self._shards = mailbox.shard_count(subscription.name)
        capacity = self._policy.shard_capacity
        self._capacity = capacity - capacity // share if share else capacity
        self._added: dict[int, int] = {}
        self._keys: dict[str, MessageSent] = {}
        self.events: list[Event] = []

    def add(self, sent: MessageSent, opened: dict[bytes, OpenedEnvelope]) -> bool:
        """Add the copy of a message; return whether there was room for it.

        The copy replaces an earlier one with its unique key.

        Arguments:
            opened: envelopes by stream; this one is added to them.
        """
        name, topic, now = self._subscription.name, self._topic, self._now
        # No topic has a blank, so keys of different topics differ.
        key = None if sent.unique_key is None else f"{sent.topic} {sent.unique_key}"
        shard = shard_of(sent.sticky_key or name, self._shards)
        queue = None if topic is None else topic.shards.get(shard)
        size = self._added.get(shard, 0) + (0 if queue is None else queue.size)
        holder: Message | MessageSent | None = None
        if key is not None:
            holder = self._keys.get(key) or (None if topic is None else topic.unique.get(key))
        if size - (holder is not None and holder.shard == shard) >= self._capacity:
            return False
        envelope = opened.get(sent.stream)
        if envelope is None:
            envelope = opened[sent.stream] = open_envelope(sent.envelope)
        due = now if sent.due is None else max(now, sent.due)
        expires_at = due + self._policy.ready_retention_ms * MS
        if ttl_seconds := envelope.ttl_seconds:
            expires_at = min(expires_at, sent.at + ttl_seconds * 1_000 * MS)
            if expires_at <= now:  # it would be dead-lettered at once
                return True
        copy = self._copy(sent, envelope, shard, due, expires_at, key)
        self.events.append(copy)
        self._added[shard] = self._added.get(shard, 0) + 1
        if key is not None:
            self._keys[key] = copy
        if holder is not None:
            self._added[holder.shard] = self._added.get(holder.shard, 0) - 1
            self.events.append(expire(holder, "superseded", now, note=message_id(copy.stream)))
        return True

    def _copy(
        self,
        sent: MessageSent,
        envelope: OpenedEnvelope,
        shard: int,
        due: int,
        expires_at: int,
        unique_key: str | None,
    ) -> MessageSent:
        subscription, extensions = self._subscription, envelope.extensions
        chain = hash_chain(subscription.name, envelope.published_at_us, None, sent.payload_hash, extensions)
        headers = sent.headers
        if headers.message_id is not None:
            headers = msgspec.structs.replace(headers, message_id=None)
        return MessageSent(
            copy_stream(subscription.stream, subscription.rewinds, sent.stream),
            1,
            self._now,
            subscription.name,
            shard,
            due,
            expires_at,
            sent.size,
            None,
            sent.payload_hash,
            chain,
            headers,
            sent.envelope,
            sent.priority,
            sent.sticky_key,
            unique_key,
            message_id(sent.stream, sent.headers.message_id),
        )


def _set(command: SetSubscription, mailbox: Mailbox, now: int) -> list[Event]:
    """Create a subscription, or change its filter; no event if it has that filter, or must not change."""
    name, position = command.subscription, mailbox.position
    if name in command.filter.topics:
        raise InvalidRequest(
            f"Subscription {name} can't get the messages of topic {name}, which is its own queue; choose "
            "another name."
        )
    existing = mailbox.subscriptions.get(name)
    if existing is not None:
        if existing.filter == command.filter or command.if_missing:
            return []
        if not existing.is_live:  # the filter of earlier messages is not recorded
            raise InvalidRequest(
                f"Subscription {name} copies earlier messages, to which its filter applies; change it when "
                "it is live, or delete it first."
            )
        place = (existing.stream, existing.version + 1, now)
        return [SubscriptionSet(*place, name, command.filter, existing.position, command.principal)]
    if name.startswith("$"):
        raise InvalidRequest(f"Topic {name} is reserved; choose another name for the subscription.")
    if mailbox.mode == "archive":
        raise InvalidRequest(
            f"Mailbox {mailbox.name} is an archive, which delivers no messages; create the subscription in a "
            "queue."
        )
    if len(mailbox.subscriptions) >= MAX_SUBSCRIPTIONS:
        raise Saturated(
            f"Mailbox {mailbox.name} has its limit of {MAX_SUBSCRIPTIONS} subscriptions; delete one of them.",
            SATURATED_RETRY_MS,
        )
    topic = mailbox.topics.get(name)
    if topic is not None and not topic.is_empty:
        raise queue_taken(name)
    start = position if command.start is None else check_start(command.start, mailbox)
    return [SubscriptionSet(command.stream, 1, now, name, command.filter, start, command.principal)]


def _rewind(command: RewindSubscription, mailbox: Mailbox, now: int) -> list[Event]:
    subscription = find_subscription(command.subscription, mailbox)
    start = check_start(command.start, mailbox)
    place = (subscription.stream, subscription.version + 1, now)
    return [SubscriptionRewound(*place, subscription.name, start, command.principal)]


def check_start(start: int, mailbox: Mailbox) -> int:
    """Return the position after which a subscription copies: what retention removed is left out.

    Raises: InvalidRequest for one after the end of the log.
    """
    if start > mailbox.position:
        raise InvalidRequest(
            f"Position {start} is after the end of the log at {mailbox.position}; name an earlier one."
        )
    return max(start, mailbox.truncated_through)


def _delete(command: DeleteSubscription, mailbox: Mailbox, now: int) -> list[Event]:
    subscription = find_subscription(command.subscription, mailbox)
    place = (subscription.stream, subscription.version + 1, now)
    return [SubscriptionDeleted(*place, subscription.name, command.principal)]


def _advance_subscription(command: AdvanceSubscription, mailbox: Mailbox, now: int) -> list[Event]:
    """Remove messages from the queue, or copy messages until one has no room."""
    subscription = mailbox.subscriptions.get(command.subscription)
    if subscription is None or subscription.version != command.version or subscription.is_live:
        return []
    if subscription.status == "clearing":
        events: list[Event] = [expire(each, "rewound", now) for each in _cleared(command, mailbox)]
        if not command.is_cleared:
            return events
        return [*events, _advance(subscription, "copying", subscription.position, now)]
    queue, position = _Queue(subscription, mailbox, now, SENDS_SHARE), subscription.position
    opened: dict[bytes, OpenedEnvelope] = {}
    for place, sent in command.sent:
        if not queue.add(sent, opened):
            break
        opened.clear()
        position = place
    else:
        position = command.through
    if position <= subscription.position and position < mailbox.position:
        return []  # there is no room, or nothing was read
    status: SubscriptionStatus = "live" if position == mailbox.position else "copying"
    skipped = sum(subscription.position < each <= position for each in command.altered)
    return [*queue.events, _advance(subscription, status, position, now, skipped)]


def _cleared(command: AdvanceSubscription, mailbox: Mailbox) -> Iterable[Message]:
    for stream in command.cleared:
        message = mailbox.messages.get(stream)
        if message is not None and message.topic == command.subscription:
            yield message


def _advance(
    subscription: Subscription, status: SubscriptionStatus, position: int, now: int, skipped: int = 0
) -> SubscriptionAdvanced:
    return SubscriptionAdvanced(
        subscription.stream, subscription.version + 1, now, subscription.name, status, position, skipped
    )


_DECIDE: dict[type, Callable[[Any, Mailbox, int], Sequence[Event]]] = {
    SetSubscription: _set,
    RewindSubscription: _rewind,
    AdvanceSubscription: _advance_subscription,
    DeleteSubscription: _delete,
}
