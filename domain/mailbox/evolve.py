"""The mailbox's fold: `evolve(state, event) -> state`."""

from collections.abc import Callable
from typing import Any

from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    MailboxSettingsChanged,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.mailbox.keyed_shard import FairShard, KeyedShard
from postroom.domain.mailbox.ownership import owner_changed, truncated
from postroom.domain.mailbox.replay import ReplayEntry
from postroom.domain.mailbox.state import ALL_TOPICS, Mailbox
from postroom.domain.message import (
    ARCHIVED,
    IN_FLIGHT,
    MS,
    READY,
    REPLACED,
    Message,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.message_decider import evolve as evolve_message
from postroom.domain.record import Event
from postroom.domain.redrive.job import RedriveEvent
from postroom.domain.redrive.job import evolve as evolve_redrives
from postroom.domain.schedule import ScheduleEvent
from postroom.domain.schedule import evolve as evolve_schedules
from postroom.domain.subscription import SubscriptionEvent
from postroom.domain.subscription import evolve as evolve_subscriptions


def evolve(mailbox: Mailbox, event: Event) -> Mailbox:
    """Apply an event to the mailbox, in place, and return the mailbox.

    A mailbox may have millions of messages, so it is changed rather than copied. When an append fails, the
    whole state is discarded and loaded from the log again.
    """
    mailbox.position += 1
    _EVOLVE[type(event)](mailbox, event)
    mailbox.at = event.at
    return mailbox


def _sent(mailbox: Mailbox, event: MessageSent) -> None:
    message = evolve_message(None, event, mailbox.position)
    is_archived = message.status == ARCHIVED
    if is_archived:
        mailbox.archived += 1
        if event.idem_key is None:
            return
    topic = mailbox.topics.get(event.topic)
    if topic is None:
        if len(mailbox.topics) >= mailbox.limits.topics:
            mailbox.drop_idle_topics(event.at)
        topic = mailbox.topic(event.topic)
    if event.idem_key is not None:
        entry = ReplayEntry(event.stream, event.payload_hash, event.at)
        topic.window.add(event.idem_key, entry, topic.policy.replay_window_ms * MS)
    if is_archived:
        return
    mailbox.messages[event.stream] = message
    if event.unique_key is not None:
        topic.unique[event.unique_key] = message
    if topic.shards_in_use != topic.policy.shards:
        topic.shards_in_use = topic.shard_count
    shard = topic.shards.get(event.shard)
    (topic.shard(event.shard) if shard is None else shard).enqueue(message, event.at)
    mailbox.changed_topics.add(event.topic)
    mailbox.set_timer(message)


def _received(mailbox: Mailbox, event: MessageReceived) -> None:
    message = mailbox.messages[event.stream]
    topic = mailbox.topics[message.topic]
    shard = topic.shards[message.shard]
    if isinstance(shard, (KeyedShard, FairShard)):
        shard.deliver(message)
    else:
        shard.dequeue(message)
        shard.in_flight += 1
    if topic.ring is not None or topic.policy.rate or topic.shared is not None:
        topic.end_turns((message,), event.at)
    mailbox.in_flight += 1
    mailbox.changed_topics.add(message.topic)
    evolve_message(message, event, mailbox.position, mailbox.epoch)
    mailbox.set_timer(message)


def _extended(mailbox: Mailbox, event: MessageVisibilityExtended) -> None:
    mailbox.set_timer(evolve_message(mailbox.messages[event.stream], event, mailbox.position))


def _settled(mailbox: Mailbox, event: MessageAcked | MessageExpired) -> None:
    message = _detach(mailbox, event)
    evolve_message(message, event, mailbox.position)  # makes its timers and queue entries stale
    del mailbox.messages[event.stream]
    if message.position <= mailbox.changes.through:
        mailbox.changes.settle(event.stream)


def _dead_lettered(mailbox: Mailbox, event: MessageDeadLettered) -> None:
    message = _detach(mailbox, event)
    evolve_message(message, event, mailbox.position)
    topic = mailbox.topics[message.topic]
    topic.add_dead(message)
    topic.hold(message)
    if event.reason != REPLACED:  # nothing failed
        topic.dead_letterings[event.reason] = topic.dead_letterings.get(event.reason, 0) + 1
    if len(topic.dead) > topic.policy.dead_capacity:
        mailbox.over_capacity.add(topic.name)
    mailbox.set_timer(message)


def _returned(mailbox: Mailbox, event: MessageRequeued | MessageRedriven | MessageRescheduled) -> None:
    """Apply an event after which the message waits in the queue."""
    message = _detach(mailbox, event)
    evolve_message(message, event, mailbox.position)
    topic = mailbox.topics[message.topic]
    if message.unique_key is not None:
        topic.unique[message.unique_key] = message
    shard = topic.shards.get(message.shard)
    (topic.shard(message.shard) if shard is None else shard).enqueue(message, event.at)
    mailbox.set_timer(message)


def _detach(mailbox: Mailbox, event: Event) -> Message:
    """Remove a message from its shard, the in-flight count or the dead letters, and free its unique key."""
    message = mailbox.messages[event.stream]
    topic = mailbox.topics[message.topic]
    mailbox.changed_topics.add(message.topic)
    if message.unique_key is not None and topic.unique.get(message.unique_key) is message:
        del topic.unique[message.unique_key]
    if message.status == IN_FLIGHT:
        shard = topic.shards[message.shard]
        if isinstance(shard, (KeyedShard, FairShard)):
            shard.end_delivery(message, event.at)
        else:
            shard.in_flight -= 1
        if topic.shared is not None:
            topic.shared.in_flight -= 1
            mailbox.changed_topics.add(ALL_TOPICS)
        mailbox.in_flight -= 1
    elif message.status == READY:
        shard = topic.shards[message.shard]
        if isinstance(shard, (KeyedShard, FairShard)):
            shard.dequeue(message, event.at)
        else:
            shard.dequeue(message)
    else:
        topic.unhold(message, event.at)
        topic.remove_dead(message)
        if len(topic.dead) <= topic.policy.dead_capacity:
            mailbox.over_capacity.discard(topic.name)
    return message


def _created(mailbox: Mailbox, event: MailboxCreated) -> None:
    mailbox.mode = event.mode
    _settings_changed(mailbox, event)


def _settings_changed(mailbox: Mailbox, event: Event) -> None:
    mailbox.version = event.version
    mailbox.configure(mailbox.stored_settings.after(event), event.at)


def _paused(mailbox: Mailbox, event: TopicPaused) -> None:
    mailbox.version = event.version
    mailbox.paused_topics.add(event.topic)
    mailbox.stop_topics()


def _resumed(mailbox: Mailbox, event: TopicResumed) -> None:
    mailbox.version = event.version
    mailbox.paused_topics.discard(event.topic)
    mailbox.stop_topics()


def _redrive_changed(mailbox: Mailbox, event: RedriveEvent) -> None:
    evolve_redrives(mailbox.redrives, event)


def _subscription_changed(mailbox: Mailbox, event: SubscriptionEvent) -> None:
    evolve_subscriptions(mailbox.subscriptions, event, mailbox.position)
    mailbox.set_subscriptions(mailbox.subscriptions)


def _schedule_changed(mailbox: Mailbox, event: ScheduleEvent) -> None:
    evolve_schedules(mailbox.schedules, event)


_EVOLVE: dict[type[Event], Callable[[Mailbox, Any], None]] = {
    MessageSent: _sent,
    MessageReceived: _received,
    MessageVisibilityExtended: _extended,
    MessageAcked: _settled,
    MessageRequeued: _returned,
    MessageDeadLettered: _dead_lettered,
    MessageRedriven: _returned,
    MessageRescheduled: _returned,
    MessageExpired: _settled,
    MailboxCreated: _created,
    MailboxSettingsChanged: _settings_changed,
    OwnershipTaken: owner_changed,
    TopicPolicySet: _settings_changed,
    TopicPaused: _paused,
    TopicResumed: _resumed,
    LogTruncated: truncated,
    **dict.fromkeys(RedriveEvent.__args__, _redrive_changed),
    **dict.fromkeys(SubscriptionEvent.__args__, _subscription_changed),
    **dict.fromkeys(ScheduleEvent.__args__, _schedule_changed),
}
