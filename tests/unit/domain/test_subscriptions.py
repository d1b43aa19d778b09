"""Subscriptions: topics that get a copy of each message of their filter, in the commit of the send."""

from collections.abc import Sequence
from itertools import count
from uuid import UUID

import msgspec
import pytest

from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.messages import NewMessage
from postroom.domain.errors import InvalidRequest, NotFound, Rejected, Saturated
from postroom.domain.integrity import has_intact_headers, has_intact_payload
from postroom.domain.mailbox.commands import Command, Receive, Send, Truncate
from postroom.domain.mailbox.decide import decide
from postroom.domain.mailbox.evolve import evolve
from postroom.domain.mailbox.ownership import truncate
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS, MessageExpired, MessageSent
from postroom.domain.names import message_id
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from postroom.domain.redrive.job import StartRedrive
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.subscription import (
    MAX_SUBSCRIPTIONS,
    AdvanceSubscription,
    DeleteSubscription,
    RewindSubscription,
    SetSubscription,
    Subscription,
    SubscriptionAdvanced,
    SubscriptionFilter,
)
from tests.unit.domain.scenario import NAME, new_mailbox, policy_set

ORDERS = SubscriptionFilter(("orders.*",))


def stream_of(name: str) -> bytes:
    return name.encode().rjust(16, b"-")


class Scene:
    """A mailbox to which commands are given one after the other."""

    def __init__(self, *policies: tuple[str, TopicPolicy]) -> None:
        ids = count(1)
        self.factory = MessageFactory(NAME, lambda: 0, lambda: UUID(int=next(ids)))
        self.mailbox = Mailbox(NAME)
        self.sent: list[tuple[int, MessageSent]] = []
        self.now = 0
        for event in new_mailbox():
            evolve(self.mailbox, event)
        for version, (topic, policy) in enumerate(policies, 3):
            evolve(self.mailbox, policy_set(policy, topic=topic, version=version))

    def do(self, command: Command, *, at: int | None = None) -> Sequence[Event]:
        self.now = self.now if at is None else at
        events = decide(command, self.mailbox, self.now * MS)
        for event in events:
            evolve(self.mailbox, event)
            if isinstance(event, MessageSent) and event.copy_of is None:
                self.sent.append((self.mailbox.position, event))
        return events

    def refuse(self, command: Command, error: type[Rejected], match: str) -> None:
        with pytest.raises(error, match=match):
            decide(command, self.mailbox, self.now * MS)

    def subscribe(
        self, name: str = "mail", filter_: SubscriptionFilter = ORDERS, start: int | None = None
    ) -> None:
        self.do(SetSubscription(name, filter_, stream_of(name), start))

    def send(self, topic: str = "orders.eu", payload: bytes = b"x", **fields: object) -> Send:
        new = NewMessage(topic=topic, payload=payload, **fields)  # type: ignore[arg-type] # of several types
        return self.factory.from_message(new).command

    def copy(self, name: str = "mail", *, through: int | None = None) -> Sequence[Event]:
        """Copy what the log has after the subscription's position."""
        subscription = self.subscription(name)
        end = self.mailbox.position if through is None else through
        sent = tuple(each for each in self.sent if subscription.position < each[0] <= end)
        return self.do(AdvanceSubscription(name, subscription.version, sent=sent, through=end))

    def subscription(self, name: str = "mail") -> Subscription:
        return self.mailbox.subscriptions[name]

    def waiting(self, topic: str = "mail") -> list[bytes]:
        return [each.stream for each in self.mailbox.messages.values() if each.topic == topic]


def copies(events: Sequence[Event]) -> list[MessageSent]:
    return [each for each in events if isinstance(each, MessageSent) and each.copy_of is not None]


def test_a_send_is_copied_to_each_subscription_whose_filter_matches() -> None:
    scene = Scene()
    scene.subscribe("mail")
    scene.subscribe("all", SubscriptionFilter(("*",)))
    scene.subscribe("urgent", SubscriptionFilter(("orders.*",), {"kind": "urgent"}))
    events = scene.do(
        scene.send(attrs={"kind": "a"}, sticky_key="k", priority=7, idem_key="i", message_id="my id")
    )
    sent, *rest = events
    assert isinstance(sent, MessageSent)
    assert [each.topic for each in copies(rest)] == ["mail", "all"]
    for copy in copies(rest):
        assert copy.copy_of == "my id"
        assert (copy.envelope, copy.sticky_key, copy.priority) == (sent.envelope, "k", 7)
        assert (copy.idem_key, copy.headers.message_id) == (None, None)
        assert has_intact_payload(copy)
        assert has_intact_headers(copy)
    assert len({each.stream for each in events}) == 3
    assert [each.topic for each in copies(scene.do(scene.send("news")))] == ["all"]
    assert copies(scene.do(scene.send("$members"))) == []


def test_a_repeated_send_adds_no_copy() -> None:
    scene = Scene()
    scene.subscribe()
    scene.do(scene.send(idem_key="k"))
    assert scene.do(scene.send(idem_key="k")) == []


def test_nothing_is_sent_to_a_subscription_and_its_messages_are_not_copied() -> None:
    scene = Scene()
    scene.subscribe("orders.copy")
    scene.subscribe("all", SubscriptionFilter(("*",)))
    scene.refuse(scene.send("orders.copy"), InvalidRequest, "send to a topic of its filter")
    spec = RedriveSpec(destination="orders.copy")
    scene.refuse(StartRedrive(b"a redrive job---", spec, 0, 0), InvalidRequest, "which gets copies only")
    scene.refuse(
        SetSubscription("x", SubscriptionFilter(("x",)), b"of a subscription"),
        InvalidRequest,
        "its own queue",
    )
    assert [each.topic for each in copies(scene.do(scene.send()))] == ["orders.copy", "all"]


def test_what_was_sent_to_a_topic_before_it_was_a_subscription_is_copied() -> None:
    scene = Scene(("mail", TopicPolicy(subscriptions_only=True)))
    scene.do(scene.send("mail"))
    scene.subscribe("all", SubscriptionFilter(("*",)), start=0)
    scene.subscribe("mail")
    assert [each.copy_of for each in copies(scene.copy("all"))] == [message_id(scene.sent[0][1].stream)]


def test_a_subscription_without_room_is_behind_and_the_sender_is_not_refused() -> None:
    scene = Scene(("mail", TopicPolicy(shards=1, shard_capacity=2)))
    scene.subscribe()
    for _ in range(2):
        scene.do(scene.send())
    end = scene.mailbox.position
    _, advanced = scene.do(scene.send())
    assert advanced == SubscriptionAdvanced(stream_of("mail"), 2, 0, "mail", "copying", end)
    assert len(scene.do(scene.send())) == 1
    assert scene.copy() == []  # still without room
    scene.do(Receive(("mail",), 9, 1 << 20))
    for stream in scene.waiting():
        evolve(scene.mailbox, MessageExpired(stream, 3, 0, "purged"))
    assert [each.copy_of for each in copies(scene.copy())] == [
        message_id(each.stream) for _, each in scene.sent[2:]
    ]
    assert scene.subscription().is_live


def test_a_subscription_that_copies_is_live_when_it_has_all_that_was_sent() -> None:
    scene = Scene()
    for number in range(3):
        scene.do(scene.send(payload=b"%d" % number))
    scene.subscribe(start=scene.sent[0][0])
    assert scene.subscription().status == "copying"
    assert copies(scene.do(scene.send())) == []  # in the order of the log
    through = scene.sent[1][0]
    assert len(copies(scene.copy(through=through))) == 1
    assert (scene.subscription().status, scene.subscription().position) == ("copying", through)
    assert len(copies(scene.copy())) == 2
    assert scene.subscription().is_live
    assert len(copies(scene.do(scene.send()))) == 1


def test_a_step_that_was_made_for_an_earlier_state_of_a_subscription_has_no_effect() -> None:
    scene = Scene()
    scene.do(scene.send())
    scene.subscribe(start=0)
    late = AdvanceSubscription("mail", 1, sent=tuple(scene.sent), through=scene.mailbox.position)
    scene.do(RewindSubscription("mail", 0))
    assert scene.do(late) == []
    assert scene.do(AdvanceSubscription("unknown", 1)) == []


def test_a_rewind_empties_the_queue_and_copies_again_under_other_ids() -> None:
    scene = Scene()
    scene.subscribe()
    for _ in range(2):
        scene.do(scene.send())
    scene.do(Receive(("mail",), 1, 1 << 20))
    before = scene.waiting()
    scene.do(RewindSubscription("mail", 0, "an operator"))
    version = scene.subscription().version
    assert scene.do(Receive(("mail",), 9, 1 << 20)) == []
    assert scene.do(AdvanceSubscription("mail", version)) == []
    step = AdvanceSubscription("mail", version, cleared=tuple(before), is_cleared=True)
    *removed, advanced = scene.do(step)
    assert [each.reason for each in removed if isinstance(each, MessageExpired)] == ["rewound"] * 2
    assert isinstance(advanced, SubscriptionAdvanced)
    assert (scene.subscription().status, scene.waiting()) == ("copying", [])
    again = copies(scene.copy())
    assert [each.copy_of for each in again] == [message_id(each.stream) for _, each in scene.sent]
    assert {each.stream for each in again}.isdisjoint(before)


def test_the_newest_copy_of_a_unique_key_replaces_those_before() -> None:
    scene = Scene(("orders.eu", TopicPolicy(subscriptions_only=True)))
    scene.subscribe("mail")
    for _ in range(3):
        scene.do(scene.send(unique_key="k"))
    assert len(scene.waiting()) == 1
    scene.subscribe("late", start=0)
    scene.copy("late")
    (left,) = scene.waiting("late")
    assert scene.mailbox.topics["late"].unique["orders.eu k"].stream == left


def test_unique_keys_of_different_topics_are_different_in_a_subscription() -> None:
    scene = Scene()
    scene.subscribe()
    for topic in ("orders.eu", "orders.us"):
        scene.do(scene.send(topic, unique_key="k"))
    assert len(scene.waiting()) == 2


def test_a_copy_is_delayed_as_its_original_and_dead_when_its_time_to_live_ends() -> None:
    scene = Scene()
    scene.subscribe()
    (copy,) = copies(scene.do(scene.send(deliver_after_ms=5_000, ttl_seconds=60), at=1_000))
    assert (copy.due, copy.expires_at) == (6_000 * MS, 61_000 * MS)
    scene.do(DeleteSubscription("mail"))
    scene.subscribe("late", start=0)
    scene.now = 61_000
    assert copies(scene.copy("late")) == []
    assert scene.subscription("late").is_live


def test_messages_for_subscriptions_only_are_archived_in_their_topic() -> None:
    scene = Scene(("orders.eu", TopicPolicy(subscriptions_only=True)))
    scene.subscribe()
    sent, copy = scene.do(scene.send())
    assert isinstance(sent, MessageSent)
    assert isinstance(copy, MessageSent)
    assert (sent.due, copy.due) == (None, 0)
    assert scene.waiting("orders.eu") == []
    scene.refuse(scene.send(deliver_after_ms=1), InvalidRequest, "subscriptions only")


def test_another_filter_applies_from_now_on() -> None:
    scene = Scene()
    scene.subscribe()
    scene.subscribe(filter_=ORDERS)
    assert scene.subscription().version == 1
    scene.subscribe(filter_=SubscriptionFilter(("news",)))
    assert copies(scene.do(scene.send())) == []
    assert len(copies(scene.do(scene.send("news")))) == 1
    scene.do(RewindSubscription("mail", 0))
    other = SetSubscription("mail", ORDERS, b"of a subscription")
    scene.refuse(other, InvalidRequest, "when it is live")
    assert scene.do(msgspec.structs.replace(other, if_missing=True)) == []
    assert scene.subscription().filter.topics == ("news",)


def test_retention_leaves_what_a_subscription_has_yet_to_copy() -> None:
    scene = Scene()
    scene.do(scene.send())
    position = scene.mailbox.position
    scene.do(scene.send())
    scene.subscribe(start=position)
    assert truncate(Truncate(position + 1, b""), scene.mailbox, 0) == []
    assert truncate(Truncate(position, b""), scene.mailbox, 0)
    scene.copy()
    assert truncate(Truncate(position + 1, b""), scene.mailbox, 0)


def test_a_subscription_that_can_not_be_is_refused() -> None:
    scene = Scene()
    scene.do(scene.send("taken"))
    scene.refuse(
        SetSubscription("taken", ORDERS, b"of a subscription"), InvalidRequest, "receive or purge them first"
    )
    scene.refuse(
        SetSubscription("mail", ORDERS, b"of a subscription", 99), InvalidRequest, "after the end of the log"
    )
    for command in (RewindSubscription("mail", 0), DeleteSubscription("mail")):
        scene.refuse(command, NotFound, "has no subscription mail")
    for number in range(MAX_SUBSCRIPTIONS):
        scene.subscribe(f"s{number}")
    scene.refuse(SetSubscription("mail", ORDERS, b"of a subscription"), Saturated, "delete one of them")


@pytest.mark.parametrize(
    "filter_",
    [
        SubscriptionFilter(()),
        SubscriptionFilter(["orders"]),  # type: ignore[arg-type] # what is refused
        SubscriptionFilter("orders"),  # type: ignore[arg-type] # as above
        SubscriptionFilter(("a b",)),
        SubscriptionFilter(("",)),
        SubscriptionFilter((7,)),  # type: ignore[arg-type] # as above
        SubscriptionFilter(("x" * 256,)),
        SubscriptionFilter(("x",) * 101),
        SubscriptionFilter(("x",), {"": "y"}),
        SubscriptionFilter(("x",), {"y": 7}),  # type: ignore[dict-item] # as above
        SubscriptionFilter(("x",), {"\udcff": "y"}),
        SubscriptionFilter(("x",), [("y", "z")]),  # type: ignore[arg-type] # as above
    ],
)
def test_a_filter_that_matches_nothing_or_has_wrong_types_is_refused(filter_: SubscriptionFilter) -> None:
    with pytest.raises(InvalidRequest):
        filter_.validate()
