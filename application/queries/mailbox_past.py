"""What happened to a mailbox, as far as the histories of its messages depend on it."""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from postroom.application.mailbox.fold import fold
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.mailbox.events import OwnershipTaken, TopicPolicySet
from postroom.domain.message import MessageEvent, MessageSent
from postroom.domain.message_history import MessageHistory, begin, follow, take_over
from postroom.domain.names import mailbox_stream
from postroom.domain.policy import TopicPolicy


class MailboxPast(NamedTuple):
    """Changes of a mailbox's ownership and of the policies of its topics.

    Arguments:
        last, end: position and log time (µs) of the last record that counts.
        policies: of topics whose changes retention removed.
        changes: positions and events, in order.
    """

    last: int
    end: int
    policies: dict[str, TopicPolicy]
    changes: list[tuple[int, OwnershipTaken | TopicPolicySet]]

    def policies_before(self, position: int) -> dict[str, TopicPolicy]:
        """Return the policies in force before a position, as far as the log still contains them."""
        return self.policies | {
            event.topic: event.policy
            for at, event in self.changes
            if isinstance(event, TopicPolicySet) and at < position
        }

    def histories(self, events: Iterable[tuple[int, int, MessageEvent]]) -> Iterator[MessageHistory]:
        """Yield the history of a message; one for each time that its id was sent.

        Events before the first `MessageSent`, and those of archived messages, are passed over.

        Arguments:
            events: position, epoch and event, in order.
        """
        history: MessageHistory | None = None
        changes: Iterator[tuple[int, OwnershipTaken | TopicPolicySet]] = iter(())
        policy: TopicPolicy | None = None
        change = None
        for position, epoch, event in events:
            if position > self.last:
                break
            if isinstance(event, MessageSent):
                if history is not None:
                    yield history
                history = begin(event, position, epoch) if event.due is not None else None
                start = bisect_left(self.changes, position, key=_position)
                policy = self._policy_before(event.topic, start)
                changes = iter(self.changes[start:])
                change = next(changes, None)
            elif history is not None:
                while change is not None and change[0] < position:
                    policy = _apply(history, *change, policy)
                    change = next(changes, None)
                follow(history, event, position, epoch, policy)
                if history.is_settled:
                    yield history
                    history = None
        if history is not None:
            while change is not None:
                policy = _apply(history, *change, policy)
                change = next(changes, None)
            yield history

    def _policy_before(self, topic: str, index: int) -> TopicPolicy | None:
        for _, event in reversed(self.changes[:index]):
            if isinstance(event, TopicPolicySet) and event.topic == topic:
                return event.policy
        return self.policies.get(topic)


def read_mailbox_past(
    log: EventLogReader, last: int, end: int, current: Mapping[str, TopicPolicy] | None = None
) -> MailboxPast:
    """Return the history of a mailbox.

    Arguments:
        last, end: position and log time (µs) of the last record that counts.
        current: current policies by topic; None reads them from the log if needed.

    Raises: BrokenLog when the log contains a commit that this version can't read.
    """
    changes = [
        (record.position, event)
        for record in log.read_stream(mailbox_stream(log.mailbox))
        if isinstance(event := record.event, OwnershipTaken | TopicPolicySet) and record.position <= last
    ]
    policies = {}
    if (log.first_position() or 1) > 1:
        topics = {event.topic for _, event in changes if isinstance(event, TopicPolicySet)}
        # Their events were removed by retention; they were not changed since.
        by_topic = fold(log).policies if current is None else current
        policies = {topic: policy for topic, policy in by_topic.items() if topic not in topics}
    return MailboxPast(last, end, policies, changes)


def _apply(
    history: MessageHistory,
    position: int,
    event: OwnershipTaken | TopicPolicySet,
    policy: TopicPolicy | None,
) -> TopicPolicy | None:
    """Apply a change of the mailbox to a history; return its topic's policy from then on."""
    if isinstance(event, OwnershipTaken):
        take_over(history, event, position)
    elif event.topic == history.topic:
        return event.policy
    return policy


def _position(change: tuple[int, object]) -> int:
    return change[0]
