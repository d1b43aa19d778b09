"""What every mailbox promises its users: a test class inherits the suite and brings a `mailbox`."""

import asyncio
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest

from postroom.application.messages import Sent, read_receipt, write_receipt
from postroom.application.operations.mailbox import Mailbox
from postroom.application.tracing import MAX_CORR_ID_CHARS, correlate
from postroom.domain.errors import (
    FrameTooLarge,
    IdempotencyConflict,
    InvalidRequest,
    NotFound,
    Saturated,
    StaleReceipt,
)
from postroom.domain.mailbox.topic_decisions import SettingsEffect
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import SettingsChanges
from tests.conformance.mailbox_changes import MailboxChangeConformance
from tests.conformance.mailbox_refusals import MailboxRefusalConformance
from tests.conformance.mailbox_results import MailboxResultConformance
from tests.conformance.mailbox_schedules import MailboxScheduleConformance
from tests.conformance.mailbox_searches import MailboxSearchConformance
from tests.conformance.mailbox_streams import MailboxStreamConformance
from tests.conformance.mailbox_subscriptions import MailboxSubscriptionConformance
from tests.conformance.mailbox_topics import MailboxTopicConformance
from tests.conformance.redrives import check_redrive_jobs
from tests.support.stores import MAILBOX, message, receive_one

LONG_MS = 60_000


class MailboxConformance(
    MailboxStreamConformance,
    MailboxRefusalConformance,
    MailboxChangeConformance,
    MailboxResultConformance,
    MailboxSubscriptionConformance,
    MailboxScheduleConformance,
    MailboxSearchConformance,
    MailboxTopicConformance,
):
    def test_a_mailbox_has_its_name(self, mailbox: Mailbox) -> None:
        assert mailbox.name == MAILBOX

    # -- sending ---

    async def test_a_message_that_was_sent_is_received_with_all_its_headers(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(
            message(
                b'{"total": 7}',
                idem_key="key-1",
                attrs={"text": "ü", "raw": b"\xff\x00"},
                published_at_us=1_700_000_000_000_000,
                content_type="application/json",
                correlation_id="corr-1",
                causality_parent="cause-1",
                principal="shop",
                priority=7,
                ttl_seconds=3_600,
                trace_id="trace-1",
                span_id="span-1",
                schema_url="https://example.org/order",
                schema_version="2",
            )
        )
        assert not sent.duplicate
        assert UUID(sent.message_id).version == 7
        received = await receive_one(mailbox)
        assert (received.message_id, received.topic, received.attempt) == (sent.message_id, "orders", 1)
        assert (received.payload, received.json()) == (b'{"total": 7}', {"total": 7})
        assert (received.idem_key, received.namespace) == ("key-1", "acme")
        assert received.published_at_us == 1_700_000_000_000_000
        assert (received.content_type, received.priority, received.ttl_seconds) == (
            "application/json",
            7,
            3_600,
        )
        assert (received.correlation_id, received.causality_parent) == ("corr-1", "cause-1")
        assert (received.principal, received.trace_id, received.span_id) == ("shop", "trace-1", "span-1")
        assert (received.schema_url, received.schema_version) == ("https://example.org/order", "2")
        assert received.binary_attrs == {"text": "ü".encode(), "raw": b"\xff\x00"}
        assert received.attrs["text"] == "ü"
        assert received.to_json()["attrs"] == received.attrs

    async def test_a_payload_that_is_not_json_is_refused_as_such(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message(b"\xff"))
        with pytest.raises(InvalidRequest, match="is not JSON"):
            (await receive_one(mailbox)).json()

    async def test_a_repeated_send_with_an_idempotency_key_adds_nothing(self, mailbox: Mailbox) -> None:
        first = await mailbox.send_message(message(idem_key="key"))
        again = await mailbox.send_message(message(idem_key="key"))
        assert (again.message_id, again.duplicate) == (first.message_id, True)
        with pytest.raises(IdempotencyConflict):
            await mailbox.send_message(message(b"other", idem_key="key"))
        assert len(await mailbox.receive_messages("orders")) == 1

    async def test_the_original_of_a_duplicate_is_named_by_the_id_that_its_sender_chose(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.send_message(message(message_id="order 1", idem_key="key"))
        again = await mailbox.send_message(message(idem_key="key"))
        assert again == Sent("order 1", duplicate=True)

    async def test_an_id_of_the_sender_is_never_reused(self, mailbox: Mailbox) -> None:
        assert await mailbox.send_message(message(message_id="order 1")) == Sent("order 1", duplicate=False)
        await (await receive_one(mailbox)).ack()
        assert await mailbox.send_message(message(message_id="order 1")) == Sent("order 1", duplicate=True)
        with pytest.raises(IdempotencyConflict):
            await mailbox.send_message(message(b"other", message_id="order 1"))
        assert await mailbox.receive_messages("orders") == []

    async def test_each_message_of_a_batch_is_accepted_or_refused_by_itself(self, mailbox: Mailbox) -> None:
        answers = await mailbox.send_batch(
            [message(b"1"), message(topic="no spaces"), message(b"2"), message(b"x" * (2 << 20))]
        )
        assert [type(answer) for answer in answers] == [Sent, InvalidRequest, Sent, FrameTooLarge]
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"1", b"2"]
        assert await mailbox.send_batch([]) == []

    async def test_a_message_of_several_chunks_is_delivered_whole(self, mailbox: Mailbox) -> None:
        """A frame has a limit of 1 MiB, and the chunk of a stream does not bound it (svc-mailbox I-6)."""
        payload = bytes(range(256)) * 2_700
        await mailbox.send_batch([message(payload), message(b"small")])
        received = await receive_one(mailbox)
        assert received.payload == payload
        await received.nack(delay_ms=0)
        async with mailbox.stream_messages("orders") as stream:
            sizes = {len((await anext(stream)).payload) for _ in range(2)}
        assert sizes == {len(payload), len(b"small")}

    async def test_messages_have_the_correlation_id_of_the_call_that_sends_them(
        self, mailbox: Mailbox
    ) -> None:
        """Any visible ASCII character may be in one (svc-mailbox P-8)."""
        corr_ids = ["".join(map(chr, range(0x21, 0x7F))), "~" * MAX_CORR_ID_CHARS, "0"]
        for corr_id in corr_ids:
            with correlate(corr_id):
                await mailbox.send_message(message())
                await mailbox.send_batch([message(), message(correlation_id="own")])
        received = await mailbox.receive_messages("orders", max_messages=9)
        expected = [each for corr_id in corr_ids for each in (corr_id, corr_id, "own")]
        assert sorted(str(each.correlation_id) for each in received) == sorted(expected)

    async def test_messages_with_one_sticky_key_keep_their_order(self, mailbox: Mailbox) -> None:
        payloads = [str(number).encode() for number in range(50)]
        await mailbox.send_batch([message(payload, sticky_key="customer 7") for payload in payloads])
        received = await mailbox.receive_messages("orders", max_messages=50)
        assert [each.payload for each in received] == payloads
        assert len({each.shard for each in received}) == 1

    async def test_a_full_shard_refuses_with_a_retry_time(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("orders", TopicPolicy(shard_capacity=1))
        await mailbox.send_message(message())
        with pytest.raises(Saturated, match="is full") as refused:
            await mailbox.send_message(message())
        assert refused.value.retry_after_ms > 0

    # -- receiving ---

    async def test_several_topics_are_received_from_and_take_turns_in_being_first(
        self, mailbox: Mailbox
    ) -> None:
        for topic in ("a", "b", "c"):
            await mailbox.send_batch([message(topic=topic)] * 4)
        first = [(await mailbox.receive_messages(["a", "b"], max_messages=1))[0].topic for _ in range(4)]
        assert sorted(first) == ["a", "a", "b", "b"]
        rest = await mailbox.receive_messages(["a", "b", "b", "empty"], max_messages=10)
        assert sorted(each.topic for each in rest) == ["a", "a", "b", "b"]

    async def test_a_topic_whose_policy_has_priorities_delivers_the_most_urgent_message_first(
        self, mailbox: Mailbox
    ) -> None:
        policy = TopicPolicy(priorities=True, priority_aging_ms=60_000)
        await mailbox.set_topic_policy("jobs", policy)
        assert await mailbox.get_topic_policy("jobs") == policy
        for topic in ("jobs", "fifo"):
            await mailbox.send_batch(
                [message(b"%d" % n, topic=topic, priority=n) for n in (0, 5, 10)]
                + [message(b"later", topic=topic, priority=10)]
            )
        received = await mailbox.receive_messages("jobs")
        assert [each.payload for each in received] == [b"10", b"later", b"5", b"0"]
        await received[0].nack(delay_ms=0)
        assert (await receive_one(mailbox, "jobs")).payload == b"10"
        received = await mailbox.receive_messages("fifo")
        assert [each.payload for each in received] == [b"0", b"5", b"10", b"later"]

    async def test_messages_of_each_topic_are_hidden_as_its_own_policy_says(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("short", TopicPolicy(visibility_ms=250))
        await mailbox.set_topic_policy("long", TopicPolicy(visibility_ms=LONG_MS))
        await mailbox.send_batch([message(topic="short"), message(topic="long")])
        assert len(await mailbox.receive_messages(["short", "long"])) == 2
        (again,) = await mailbox.receive_messages(["short", "long"], wait_ms=LONG_MS)
        assert (again.topic, again.attempt) == ("short", 2)

    async def test_the_number_and_size_of_what_is_received_are_bounded(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(b"12345678")] * 6)
        assert len(await mailbox.receive_messages("orders", max_messages=2)) == 2
        assert len(await mailbox.receive_messages("orders", max_bytes=16)) == 2
        assert len(await mailbox.receive_messages("orders", max_bytes=1)) == 1

    async def test_a_receiver_that_waits_gets_a_message_that_is_sent_to_any_of_its_topics(
        self, mailbox: Mailbox
    ) -> None:
        waiting = asyncio.create_task(mailbox.receive_messages(["a", "b"], wait_ms=LONG_MS))
        await asyncio.sleep(0.05)
        await mailbox.send_message(message(topic="b"))
        (received,) = await waiting
        assert received.topic == "b"

    async def test_a_receiver_that_waits_in_vain_gets_nothing(self, mailbox: Mailbox) -> None:
        assert await mailbox.receive_messages("orders", wait_ms=20) == []

    async def test_a_delayed_message_is_received_when_it_is_due(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message(deliver_after_ms=1_500))
        assert await mailbox.receive_messages("orders") == []
        assert len(await mailbox.receive_messages("orders", wait_ms=LONG_MS)) == 1

    async def test_messages_can_be_looked_at_without_receiving_them(self, mailbox: Mailbox) -> None:
        await mailbox.send_batch([message(b"1"), message(b"2")])
        assert [each.payload for each in await mailbox.peek_messages("orders")] == [b"1", b"2"]
        assert [each.payload for each in await mailbox.peek_messages("orders", limit=1)] == [b"1"]
        assert (await receive_one(mailbox)).attempt == 1

    # -- pausing ---

    async def test_a_paused_topic_delivers_nothing_while_sends_and_settlements_go_on(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.send_batch([message(b"1"), message(b"2"), message(topic="others")])
        (first,) = await mailbox.receive_messages("orders", max_messages=1)
        await mailbox.pause_topic("orders")
        await mailbox.pause_topic("orders")
        await mailbox.send_message(message(b"3"))
        await first.ack()
        assert await mailbox.receive_messages("orders", wait_ms=20) == []
        assert [each.topic for each in await mailbox.receive_messages(["orders", "others"])] == ["others"]
        assert [each.payload for each in await mailbox.peek_messages("orders")] == [b"2", b"3"]
        assert (await mailbox.get_backlog()).paused_topics == ["orders"]
        await mailbox.resume_topic("orders")
        await mailbox.resume_topic("orders")
        assert (await mailbox.get_backlog()).paused_topics == []
        assert [each.payload for each in await mailbox.receive_messages("orders")] == [b"2", b"3"]

    async def test_a_receiver_that_waits_for_a_paused_topic_gets_its_messages_when_it_is_resumed(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.send_message(message())
        await mailbox.pause_topic("orders")
        waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await mailbox.resume_topic("orders")
        assert len(await waiting) == 1

    async def test_topics_are_listed_with_their_policies_and_counts(self, mailbox: Mailbox) -> None:
        assert await mailbox.list_topics() == []
        policy = TopicPolicy(max_attempts=1)
        await mailbox.set_topic_policy("orders", policy)
        await mailbox.send_batch([message(), message(), message(topic="others", deliver_after_ms=LONG_MS)])
        await (await receive_one(mailbox)).nack(reason="broken")
        await mailbox.pause_topic("orders")
        orders, others = await mailbox.list_topics()
        assert (orders.topic, orders.paused, orders.policy) == ("orders", True, policy)
        assert (orders.ready, orders.in_flight, orders.delayed, orders.dead) == (1, 0, 0, 1)
        assert orders.dead_letterings == {"max_attempts": 1}
        assert orders.oldest_at is not None
        assert (others.topic, others.paused, others.policy) == ("others", False, None)
        assert (others.ready, others.delayed, others.dead_letterings) == (0, 1, {})

    async def test_settings_are_shown_previewed_changed_and_taken_back(self, mailbox: Mailbox) -> None:
        before = await mailbox.get_settings()
        changes = SettingsChanges(
            limits={"in_flight_ceiling": 100},
            default_policy={"max_attempts": 3},
            topics={"pay.*": {"visibility_ms": 60_000, "priorities": True}, "pay.eu": {"shards": 2}},
        )
        preview = await mailbox.preview_settings(changes)
        assert (preview.before, await mailbox.get_settings()) == (before, before)
        assert await mailbox.set_settings(changes)
        assert not await mailbox.set_settings(changes)
        assert await mailbox.get_settings() == preview.after
        assert preview.after.limits.in_flight_ceiling == 100
        policy = await mailbox.get_topic_policy("pay.eu")
        assert (policy.max_attempts, policy.visibility_ms, policy.shards) == (3, 60_000, 2)
        assert policy.priorities
        fewer = SettingsChanges(topics={"pay.*": {"priorities": None}, "pay.eu": None})
        assert await mailbox.set_settings(fewer)
        assert (await mailbox.get_settings()).topics == {"pay.*": {"visibility_ms": 60_000}}
        kept = SettingsChanges(limits={"in_flight_ceiling": 100})
        assert await mailbox.set_settings(kept, replace=True)
        settings = await mailbox.get_settings()
        assert (settings.limits.in_flight_ceiling, settings.topics) == (100, {})
        assert settings.default_policy == TopicPolicy()

    async def test_labels_are_changed_one_by_one_and_outlast_a_replacement(self, mailbox: Mailbox) -> None:
        labels = {"orders": {"team": "shop", "cost": "7 €"}, "pay.eu": {"x": ""}}
        topics = {"orders": {"max_attempts": 3}, "pay.eu": {"shards": 2}, "other": {"shards": 2}}
        await mailbox.set_settings(SettingsChanges(topics=topics, labels=labels))
        assert (await mailbox.get_settings()).labels == labels
        await mailbox.set_settings(
            SettingsChanges(labels={"orders": {"cost": None, "b": "1"}, "pay.eu": None})
        )
        assert await mailbox.set_settings(SettingsChanges(), replace=True)
        settings = await mailbox.get_settings()
        assert settings.labels == {"orders": {"team": "shop", "b": "1"}}
        assert settings.topics == {"orders": {"max_attempts": 3}}

    async def test_a_policy_of_some_fields_leaves_the_others_to_the_globs_and_the_default(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("pay.eu", {"shards": 2, "priorities": False})
        changes = SettingsChanges(
            default_policy={"dead_capacity": 11}, topics={"pay.*": {"max_attempts": 7, "shards": 3}}
        )
        await mailbox.set_settings(changes)
        assert await mailbox.get_topic_policy("pay.eu") == TopicPolicy(
            shards=2, dead_capacity=11, max_attempts=7
        )
        await mailbox.set_topic_policy("pay.eu", {"visibility_ms": 60_000})
        assert (await mailbox.get_settings()).topics["pay.eu"] == {
            "shards": 2,
            "priorities": False,
            "visibility_ms": 60_000,
        }
        await mailbox.set_topic_policy("pay.eu", {"shards": None, "priorities": None, "visibility_ms": None})
        assert (await mailbox.get_settings()).topics == {"pay.*": {"max_attempts": 7, "shards": 3}}
        for wrong in (
            {"shardz": 1},
            {"shards": 0},
            {"shards": "2"},
            {"priorities": 3},
            {"max_attempts": True},
        ):
            with pytest.raises(InvalidRequest):
                await mailbox.set_topic_policy("pay.eu", cast(Any, wrong))
        assert (await mailbox.get_topic_policy("pay.eu")).shards == 3
        await mailbox.set_topic_policy("pay.eu", TopicPolicy(shards=4))
        assert await mailbox.get_topic_policy("pay.eu") == TopicPolicy(shards=4)

    async def test_a_preview_counts_what_a_change_of_settings_would_lose(self, mailbox: Mailbox) -> None:
        await mailbox.set_settings(SettingsChanges(topics={"orders": {"max_attempts": 1}}))
        await mailbox.send_batch([message(b"1"), message(b"2"), message(b"3")])
        for received in await mailbox.receive_messages("orders"):
            await received.nack(reason="broken")
        preview = await mailbox.preview_settings(SettingsChanges(default_policy={"dead_capacity": 1}))
        assert preview.effects == [SettingsEffect("orders", "dead_letters_expired", 2)]
        assert len((await mailbox.list_dead_letters("orders")).items) == 3

    @pytest.mark.parametrize(
        "changes",
        [
            SettingsChanges(limits={"no_such_limit": 1}),
            SettingsChanges(default_policy={"max_attempts": 0}),
            SettingsChanges(topics={"no spaces": {"shards": 1}}),
            SettingsChanges(topics={"pay.*": {"replay_window_ms": 1}}),
            SettingsChanges(limits=cast("Any", None)),
            SettingsChanges(limits=cast("Any", {None: 1})),
            SettingsChanges(default_policy=cast("Any", {"shards": object()})),
            SettingsChanges(topics={"\ud800": None}),
            SettingsChanges(subject_policies=cast("Any", {1: None})),
            SettingsChanges(subject_policies=cast("Any", {"mail": object()})),
        ],
    )
    async def test_invalid_settings_are_refused_and_change_nothing(
        self, mailbox: Mailbox, changes: SettingsChanges
    ) -> None:
        before = await mailbox.get_settings()
        for refused in (mailbox.preview_settings(changes), mailbox.set_settings(changes)):
            with pytest.raises(InvalidRequest):
                await refused
        assert await mailbox.get_settings() == before

    # -- settling ---

    async def test_an_acked_message_never_comes_back(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        await received.ack()
        await received.ack()
        assert await mailbox.ack_messages([received.receipt, received.receipt]) == [None, None]
        assert (await mailbox.get_backlog()).shards == []
        assert (await mailbox.get_message(received.message_id)).status == "acked"

    async def test_a_nacked_message_comes_back_with_the_next_attempt(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        await (await receive_one(mailbox)).nack(reason="broken", delay_ms=0)
        again = await receive_one(mailbox)
        assert again.attempt == 2
        assert (await mailbox.get_message(again.message_id)).last_error == "broken"

    async def test_an_unsettled_message_comes_back_when_its_visibility_ends(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        (first,) = await mailbox.receive_messages("orders", visibility_ms=250)
        (second,) = await mailbox.receive_messages("orders", wait_ms=LONG_MS)
        assert (first.attempt, second.attempt) == (1, 2)
        with pytest.raises(StaleReceipt):
            await first.ack()
        await second.ack()

    async def test_an_extended_delivery_stays_hidden(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        (received,) = await mailbox.receive_messages("orders", visibility_ms=LONG_MS)
        await received.extend(2 * LONG_MS)
        assert await mailbox.extend_visibility([received.receipt], 3 * LONG_MS) == [None]
        history = (await mailbox.get_message(received.message_id)).history
        assert [entry.event for entry in history][2:] == ["MessageVisibilityExtended"] * 2

    async def test_a_message_is_dead_lettered_after_its_last_attempt_and_can_be_redriven(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", TopicPolicy(max_attempts=1))
        assert await mailbox.get_topic_policy("orders") == TopicPolicy(max_attempts=1)
        assert await mailbox.get_topic_policy("others") == TopicPolicy()
        await mailbox.send_batch([message(b"1"), message(b"2"), message(b"3")])
        for received in await mailbox.receive_messages("orders"):
            await received.nack(reason="broken")
        letters = (await mailbox.list_dead_letters("orders", reason="max_attempts")).items
        assert [letter.last_error for letter in letters] == ["broken"] * 3
        await check_redrive_jobs(mailbox, "orders", 3)
        letters = (await mailbox.list_dead_letters("orders")).items
        first = await mailbox.list_dead_letters(limit=1)
        rest = await mailbox.list_dead_letters(limit=2, cursor=first.next_cursor)
        assert (first.items + rest.items, rest.next_cursor) == (letters, None)
        assert await mailbox.redrive_dead_letters("orders", message_ids=[letters[0].message_id]) == 1
        assert await mailbox.redrive_dead_letters("orders", limit=1) == 1
        assert await mailbox.purge_topic("orders") == 1
        assert len(await mailbox.receive_messages("orders")) == 2

    async def test_a_receipt_survives_being_written_down(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        assert await mailbox.ack_messages([read_receipt(write_receipt(received.receipt))]) == [None]

    # -- queries ---

    async def test_a_message_is_explained(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        await (await receive_one(mailbox)).ack()
        detail = await mailbox.get_message(sent.message_id)
        assert [entry.event for entry in detail.history] == ["MessageSent", "MessageReceived", "MessageAcked"]
        assert detail.item.topic == "orders"
        explanation = await mailbox.explain_message(sent.message_id)
        assert explanation.message_id == sent.message_id
        assert [delivery.attempt for delivery in explanation.deliveries] == [1]

    async def test_the_backlog_is_counted_now_and_as_it_was(self, mailbox: Mailbox) -> None:
        before = (await mailbox.get_backlog()).position
        await mailbox.send_batch([message(), message(topic="others")])
        await receive_one(mailbox)
        (row,) = (await mailbox.get_backlog("orders")).shards
        assert (row.ready, row.in_flight) == (0, 1)
        assert (await mailbox.get_backlog()).ready == 1
        assert (await mailbox.get_backlog(at=before)).shards == []
        with pytest.raises(InvalidRequest, match="in the future"):
            await mailbox.get_backlog(at=datetime(2500, 1, 1, tzinfo=UTC))

    async def test_old_events_are_deleted_up_to_the_oldest_unsettled_message(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        await (await receive_one(mailbox)).ack()
        waiting = await mailbox.send_message(message())
        now = datetime.fromisoformat((await mailbox.get_backlog()).as_of)
        assert await mailbox.delete_old_events(int((now.timestamp() + 1) * 1e6)) > 0
        with pytest.raises(NotFound):
            await mailbox.get_message(sent.message_id)
        assert (await mailbox.get_message(waiting.message_id)).status == "ready"
