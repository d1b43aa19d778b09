"""Subscriptions: their filter, their commands and events, and their state (ADR 0119)."""

from typing import Literal

import msgspec

from postroom.domain.arguments import check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers, MessageSent
from postroom.domain.names import check_topic_pattern
from postroom.domain.record import Event
from postroom.domain.search import topic_matches

MAX_SUBSCRIPTIONS = 256
"""Subscriptions of a mailbox."""
MAX_PATTERNS = 100
"""Topics and globs of a subscription, and headers."""

SubscriptionStatus = Literal["live", "clearing", "copying"]
"""State of a subscription. `live`: each send adds its copy. `copying`: the owner copies earlier messages
from the log. `clearing`: the owner empties the queue after a rewind, before it copies."""


class SubscriptionFilter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The messages of which a subscription gets copies.

    Arguments:
        topics: names or globs (see `topic_matches`); one must match. Names that begin with `$` are reserved,
            and only match themselves.
        headers: custom headers that a message must have with exactly these values.
    """

    topics: tuple[str, ...]
    headers: dict[str, str] = {}

    def validate(self) -> "SubscriptionFilter":
        """Return this filter.

        Raises: InvalidRequest naming the first value of a wrong type or out of bounds.
        """
        topics: object = self.topics
        if type(topics) is not tuple or not 1 <= len(topics) <= MAX_PATTERNS:
            raise InvalidRequest(
                f"The filter of a subscription must have 1 to {MAX_PATTERNS} topics or globs."
            )
        for pattern in topics:
            check_topic_pattern(pattern)
        headers = check_type("The headers of a subscription", self.headers, dict)
        if len(headers) > MAX_PATTERNS:
            raise InvalidRequest(f"The filter of a subscription must have at most {MAX_PATTERNS} headers.")
        for name, value in headers.items():
            check_text("The name of a header", name, 1)
            check_text(f"The value of header {name}", value)
        return self

    def covers_topic(self, topic: str) -> bool:
        """Return whether messages of a topic may match; their headers are not compared."""
        if topic.startswith("$"):
            return topic in self.topics
        return any(topic_matches(pattern, topic) for pattern in self.topics)

    def covers_headers(self, headers: Headers) -> bool:
        """Return whether a message with these headers may match; its topic is not compared.

        Arguments:
            headers: custom headers of a message, by name.
        """
        return not self.headers or self.headers.items() <= (headers.custom_headers or {}).items()

    def covers(self, sent: MessageSent) -> bool:
        """Return whether a message matches; a copy matches no filter.

        Arguments:
            sent: event of the message.
        """
        return sent.copy_of is None and self.covers_topic(sent.topic) and self.covers_headers(sent.headers)

    def describe(self) -> str:
        """Return the filter for a sentence, such as `orders.*, refunds with country=de`."""
        headers = "".join(f" with {name}={value}" for name, value in self.headers.items())
        return ", ".join(self.topics) + headers


def check_filter(value: object) -> SubscriptionFilter:
    """Return a filter whose fields are valid, or raise InvalidRequest."""
    return check_type("The filter of a subscription", value, SubscriptionFilter).validate()


class Subscription(msgspec.Struct, frozen=True):
    """State of a subscription.

    Arguments:
        name: also the name of the topic that is its queue.
        stream: id of its events, 16 bytes; a later subscription of the same name has another id.
        position: unless it is live, the position of the log through which its messages were copied.
        rewinds: number of times that it was rewound; copies of one message differ by it.
        skipped: number of messages that could not be copied, as their bytes were altered on disk.
        created_at, changed_at: log time, µs.
    """

    name: str
    stream: bytes
    version: int
    filter: SubscriptionFilter
    status: SubscriptionStatus
    position: int
    created_at: int
    changed_at: int
    rewinds: int = 0
    skipped: int = 0

    @property
    def is_live(self) -> bool:
        """Return whether each send adds its copy."""
        return self.status == "live"

    def behind(self, end: int) -> int:
        """Return the number of positions of a log that ends at `end` that it has yet to read."""
        return 0 if self.is_live else end - self.position


class SubscriptionSet(Event, frozen=True, gc=False):
    """An operator created a subscription, or changed its filter from now on.

    Arguments:
        position: for a new subscription, the position of the log after which it gets copies; else the
            position that it has.
        principal: to whom the capability of the operator was issued; None for the mailbox's own user.
    """

    subscription: str
    filter: SubscriptionFilter
    position: int
    principal: str | None = None


class SubscriptionRewound(Event, frozen=True, gc=False):
    """An operator rewound a subscription: the owner empties its queue, then copies what follows `position`.

    Arguments:
        principal: see `SubscriptionSet`.
    """

    subscription: str
    position: int
    principal: str | None = None


class SubscriptionAdvanced(Event, frozen=True, gc=False):
    """A subscription changed its status, or copied messages, by the events before this one in its commit.

    Arguments:
        position: through which its messages were copied.
        skipped: number of messages that could not be copied.
    """

    subscription: str
    status: SubscriptionStatus
    position: int
    skipped: int = 0


class SubscriptionDeleted(Event, frozen=True, gc=False):
    """An operator deleted a subscription; the messages in its topic stay.

    Arguments:
        principal: see `SubscriptionSet`.
    """

    subscription: str
    principal: str | None = None


SubscriptionEvent = SubscriptionSet | SubscriptionRewound | SubscriptionAdvanced | SubscriptionDeleted


def evolve(subscriptions: dict[str, Subscription], event: SubscriptionEvent, position: int) -> None:
    """Apply an event to the subscriptions of a mailbox, in place.

    Arguments:
        position: of the event.
    """
    name = event.subscription
    if isinstance(event, SubscriptionDeleted):
        del subscriptions[name]
        return
    before = subscriptions.get(name)
    if before is None:
        assert isinstance(event, SubscriptionSet), f"{type(event).__name__} came before SubscriptionSet"
        status: SubscriptionStatus = "live" if event.position == position - 1 else "copying"
        subscriptions[name] = Subscription(
            name, event.stream, event.version, event.filter, status, event.position, event.at, event.at
        )
        return
    changes: dict[str, object] = {"version": event.version, "changed_at": event.at}
    if isinstance(event, SubscriptionSet):
        changes["filter"] = event.filter
    elif isinstance(event, SubscriptionRewound):
        changes |= {"status": "clearing", "position": event.position, "rewinds": before.rewinds + 1}
    else:
        skipped = before.skipped + event.skipped
        changes |= {"status": event.status, "position": event.position, "skipped": skipped}
    subscriptions[name] = msgspec.structs.replace(before, **changes)


class SetSubscription(msgspec.Struct, frozen=True, gc=False):
    """Command to create a subscription, or to change the filter of one that exists.

    Arguments:
        stream: id of the events of a new one, 16 random bytes.
        start: position of the log after which a new one gets copies; None for the end of the log.
        principal: see `SubscriptionSet`.
        if_missing: whether one that exists stays as it is.
    """

    subscription: str
    filter: SubscriptionFilter
    stream: bytes
    start: int | None = None
    principal: str | None = None
    if_missing: bool = False


class RewindSubscription(msgspec.Struct, frozen=True, gc=False):
    """Command to empty the queue of a subscription, and to copy the messages after `start` again."""

    subscription: str
    start: int
    principal: str | None = None


class AdvanceSubscription(msgspec.Struct, frozen=True, gc=False):
    """Command to empty the queue of a subscription further, or to copy its next messages.

    Arguments:
        version: version of the subscription for which the command was made; it has no effect on any other.
        cleared: streams of messages of its topic that are to be removed.
        is_cleared: whether the topic has no other messages.
        sent: messages of the log that match, each after its position, in order.
        through: position through which the log was read; the subscription is live if it is the log's end.
        altered: positions of messages that match and whose bytes were altered on disk.
        is_last: whether the owner adds the messages sent since `through`, unless they are many.
    """

    subscription: str
    version: int
    cleared: tuple[bytes, ...] = ()
    is_cleared: bool = False
    sent: tuple[tuple[int, MessageSent], ...] = ()
    through: int = 0
    altered: tuple[int, ...] = ()
    is_last: bool = False


class DeleteSubscription(msgspec.Struct, frozen=True, gc=False):
    """Command to delete a subscription; the messages in its topic stay."""

    subscription: str
    principal: str | None = None


SubscriptionCommand = SetSubscription | RewindSubscription | AdvanceSubscription | DeleteSubscription
