"""Changes of single messages, and ordered keys; a part of `MailboxConformance`."""

import asyncio
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest

from postroom.application.messages import NewMessage, Sent
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest, StaleReceipt
from postroom.domain.policy import PolicyValue
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.settings import SettingsChanges
from tests.support.stores import message, receive_one
from tests.support.waiting import until_answer

LONG_MS = 60_000


class MailboxChangeConformance:
    async def test_a_rejected_message_is_a_dead_letter_at_once(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(message())
        received = await receive_one(mailbox)
        await received.reject("no such customer")
        (letter,) = (await mailbox.list_dead_letters("orders")).items
        assert (letter.reason, letter.last_error, letter.attempt) == ("rejected", "no such customer", 1)
        with pytest.raises(StaleReceipt, match=received.message_id):
            await received.ack()

    async def test_a_released_message_comes_back_and_counts_no_attempt(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("orders", {"max_attempts": 1})
        await mailbox.send_message(message())
        for _ in range(3):
            received = await receive_one(mailbox)
            assert received.attempt == 1
            await received.release()
        await (await receive_one(mailbox)).release(LONG_MS)
        assert await mailbox.receive_messages("orders") == []
        why = await mailbox.explain_message(received.message_id)
        assert "counts no attempt" in why.deliveries[-1].why

    async def test_a_nack_with_an_unknown_action_or_a_delay_of_a_rejection_is_refused(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.send_message(message())
        receipt = (await receive_one(mailbox)).receipt
        for options in ({"action": "drop"}, {"action": None}, {"action": "reject", "delay_ms": 1}):
            with pytest.raises(InvalidRequest, match="action"):
                await mailbox.nack_messages([receipt], **options)
        assert await mailbox.ack_messages([receipt]) == [None]

    async def test_jobs_cancel_and_reschedule_the_messages_of_a_query_that_wait(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", {"max_attempts": 1})
        await mailbox.send_message(message(message_id="order 0"))
        await (await receive_one(mailbox)).nack()  # a dead letter, which no such job changes
        attrs = {"region": "eu"}
        for number in range(1, 5):
            await mailbox.send_message(message(message_id=f"order {number}", sticky_key="k", attrs=attrs))
        await mailbox.send_message(message(message_id="order 5", deliver_after_ms=LONG_MS, attrs=attrs))
        await mailbox.send_message(message(topic="mail", message_id="mail", attrs=attrs))
        taken = await receive_one(mailbox)

        async def run(spec: RedriveSpec) -> tuple[str, int, int]:
            preview = await mailbox.preview_redrive(spec)
            job = (await mailbox.start_redrive(spec)).job_id

            async def is_idle() -> bool:
                return not (await mailbox.get_redrive(job)).is_active

            await until_answer(is_idle)
            report = await mailbox.get_redrive(job)
            assert (report.spec.action, report.matched) == (spec.action, preview.matched)
            page = await mailbox.list_redrive_messages(job)
            assert len(page.items) == report.moved + report.skipped == report.matched
            return page.items[0].outcome, report.moved, report.skipped

        later = RedriveSpec(action="reschedule", topics=("ord*",), keys=("k",), delay_ms=LONG_MS)
        assert await run(later) == ("rescheduled", 3, 0)
        assert await mailbox.receive_messages("orders") == []
        cancel = RedriveSpec(action="cancel", topics=("orders",), headers=attrs, note="over", limit=None)
        preview = await mailbox.preview_redrive(cancel)
        groups = {each.reason: each.count for each in preview.groups}
        assert groups == {"delayed": 4, "in_flight": 1}
        assert {each.reason for each in preview.samples} == {*groups}
        assert await run(cancel) == ("cancelled", 5, 0)
        with pytest.raises(StaleReceipt):
            await taken.ack()
        last = (await mailbox.get_message("order 3")).history[-1]
        assert (last.facts["reason"], last.facts["note"]) == ("cancelled", "over")
        assert "redrive_job" in last.facts
        assert "over" in str(await mailbox.explain_message("order 3"))
        now = RedriveSpec(action="reschedule", topics=("mail",), at=0)
        assert await run(now) == ("rescheduled", 1, 0)
        assert (await receive_one(mailbox, "mail")).message_id == "mail"
        assert len((await mailbox.list_dead_letters("orders")).items) == 1
        for wrong in (RedriveSpec(action="cancel", reasons=("rejected",)), RedriveSpec(note="why")):
            with pytest.raises(InvalidRequest, match="leave it out of action"):
                await mailbox.preview_redrive(wrong)

    async def test_messages_are_cancelled_by_their_ids(self, mailbox: Mailbox) -> None:
        ready = await mailbox.send_message(message(message_id="order 1", sticky_key="k"))
        delayed = await mailbox.send_message(message(deliver_after_ms=LONG_MS))
        taken = await mailbox.send_message(message(topic="taken"))
        settled = await mailbox.send_message(message(topic="settled"))
        dead = await mailbox.send_message(message(topic="dead"))
        received = await receive_one(mailbox, "taken")
        await (await receive_one(mailbox, "settled")).ack()
        await (await receive_one(mailbox, "dead")).reject()
        ids = [each.message_id for each in (ready, delayed, taken, settled, dead)]
        changes = await mailbox.cancel_messages([*ids, "order 2"], reason="ordered twice")
        assert [each.message_id for each in changes] == [*ids, "order 2"]
        outcomes = ["changed", "changed", "changed", "settled", "dead", "unknown"]
        assert [each.outcome for each in changes] == outcomes
        assert await mailbox.receive_messages(["orders", "taken"]) == []
        assert [type(each) for each in await mailbox.ack_messages([received.receipt])] == [StaleReceipt]
        (again,) = await mailbox.cancel_messages([taken.message_id])
        assert again.outcome == "settled"
        why = await mailbox.explain_message(ready.message_id)
        assert "ordered twice" in why.story[-1].text

    async def test_a_message_is_rescheduled_to_now_or_later(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message(deliver_after_ms=LONG_MS))
        (soon,) = await mailbox.reschedule_messages([sent.message_id], deliver_after_ms=0)
        assert soon.outcome == "changed"
        await (await receive_one(mailbox)).nack(delay_ms=LONG_MS)
        (again,) = await mailbox.reschedule_messages([sent.message_id], deliver_after_ms=LONG_MS // 2)
        assert again.outcome == "changed"
        assert await mailbox.receive_messages("orders") == []
        await mailbox.reschedule_messages([sent.message_id], deliver_after_ms=0)
        received = await receive_one(mailbox)
        assert received.attempt == 2
        changes = await mailbox.reschedule_messages([sent.message_id, "order 2"], deliver_after_ms=0)
        assert [each.outcome for each in changes] == ["in_flight", "unknown"]

    async def test_a_message_is_rescheduled_to_a_time_and_one_in_the_past_is_now(
        self, mailbox: Mailbox
    ) -> None:
        sent = await mailbox.send_message(message())
        later = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
        (change,) = await mailbox.reschedule_messages([sent.message_id], at=later)
        assert change.outcome == "changed"
        assert await mailbox.receive_messages("orders") == []
        shown = later.isoformat(timespec="microseconds").replace("+00:00", "Z")
        assert f"from {shown} on" in (await mailbox.explain_message(sent.message_id)).story[-1].text
        await mailbox.reschedule_messages([sent.message_id], at=later - timedelta(days=400))
        assert (await receive_one(mailbox)).message_id == sent.message_id

    async def test_a_message_is_rescheduled_either_by_a_delay_or_to_a_time(self, mailbox: Mailbox) -> None:
        now = datetime.now(UTC)
        with pytest.raises(InvalidRequest, match="either deliver_after_ms or at"):
            await mailbox.reschedule_messages(["order 1"])
        with pytest.raises(InvalidRequest, match="either deliver_after_ms or at"):
            await mailbox.reschedule_messages(["order 1"], deliver_after_ms=0, at=now)
        with pytest.raises(InvalidRequest, match="within 36,500 days"):
            await mailbox.reschedule_messages(["order 1"], at=now + timedelta(days=40_000))
        with pytest.raises(InvalidRequest, match="offset"):
            await mailbox.reschedule_messages(["order 1"], at=now.replace(tzinfo=None))

    async def test_a_receiver_that_waits_gets_a_message_that_is_rescheduled_to_now(
        self, mailbox: Mailbox
    ) -> None:
        sent = await mailbox.send_message(message(deliver_after_ms=LONG_MS))
        waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS // 2))
        await asyncio.sleep(0.05)
        await mailbox.reschedule_messages([sent.message_id], deliver_after_ms=0)
        assert [each.message_id for each in await waiting] == [sent.message_id]

    async def test_while_a_message_is_unsettled_another_one_with_its_unique_key_is_a_duplicate(
        self, mailbox: Mailbox
    ) -> None:
        first = await mailbox.send_message(message(unique_key="k", message_id="order 1"))
        others = [message(b"again", unique_key="k"), message(b"other", topic="news", unique_key="k")]
        again, other = await mailbox.send_batch(others)
        assert again == Sent(first.message_id, duplicate=True)
        assert isinstance(other, Sent)
        assert not other.duplicate
        received = await receive_one(mailbox)
        assert (await mailbox.send_message(message(b"again", unique_key="k"))).duplicate
        await received.ack()
        assert not (await mailbox.send_message(message(b"again", unique_key="k"))).duplicate

    async def test_the_latest_payload_or_delay_of_a_unique_key_wins(self, mailbox: Mailbox) -> None:
        first = await mailbox.send_message(message(b"1", unique_key="k"))
        later = message(b"2", unique_key="k", on_conflict="reschedule", deliver_after_ms=LONG_MS)
        assert (await mailbox.send_message(later)).message_id == first.message_id
        assert await mailbox.receive_messages("orders") == []
        latest = await mailbox.send_message(message(b"3", unique_key="k", on_conflict="replace"))
        assert not latest.duplicate
        received = await receive_one(mailbox)
        assert received.payload == b"3"
        await mailbox.send_message(message(b"4", unique_key="k", on_conflict="replace"))
        with pytest.raises(StaleReceipt, match=r"is now expired \(superseded\)"):
            await received.ack()
        await (await receive_one(mailbox)).ack()
        why = await mailbox.explain_message(first.message_id)
        assert latest.message_id in why.story[-1].text

    async def test_a_wrong_unique_key_is_refused(self, mailbox: Mailbox) -> None:
        for fields in ({"unique_key": ""}, {"unique_key": "x" * 256}, {"unique_key": 7}):
            with pytest.raises(InvalidRequest, match="unique_key"):
                await mailbox.send_message(message(**fields))
        for conflict, key in (("drop", "k"), ("replace", None), (None, "k")):
            with pytest.raises(InvalidRequest, match="on_conflict"):
                await mailbox.send_message(message(unique_key=key, on_conflict=conflict))
        assert await mailbox.receive_messages("orders") == []

    async def test_fair_keys_take_turns(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("orders", {"fair_keys": True})
        keys = ["loud"] * 12 + ["quiet", "calm"]
        await mailbox.send_batch([message(key.encode(), sticky_key=key) for key in keys])
        received = await mailbox.receive_messages("orders", max_messages=8)  # of several mailboxes, perhaps
        assert {each.payload for each in received} == {b"loud", b"quiet", b"calm"}

    async def test_a_receiver_that_waits_gets_a_message_when_a_limit_allows_it(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", {"max_in_flight": 2, "fair_keys": True})
        await mailbox.send_batch([message(b"%d" % n) for n in range(3)])
        first, _ = await mailbox.receive_messages("orders")
        waiting = asyncio.create_task(mailbox.receive_messages("orders", wait_ms=LONG_MS // 2))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await first.ack()
        assert [each.payload for each in await waiting] == [b"2"]

    async def test_a_receiver_that_waits_gets_a_message_when_a_rate_allows_it(self, mailbox: Mailbox) -> None:
        await mailbox.set_topic_policy("orders", {"rate": 1, "rate_period_ms": 300})
        await mailbox.send_batch([message(b"%d" % n) for n in range(3)])
        times = []
        for n in range(3):
            (received,) = await mailbox.receive_messages("orders", wait_ms=LONG_MS // 2)
            assert received.payload == b"%d" % n
            times.append(received.visible_at_us)
        assert all(after - before >= 300_000 for before, after in pairwise(times))

    async def test_topics_of_a_section_share_its_limits_and_a_receiver_waits_until_another_topic_allows_it(
        self, mailbox: Mailbox
    ) -> None:
        shared: dict[str, PolicyValue] = {"shared_limits": True, "max_in_flight": 1}
        await mailbox.set_settings(SettingsChanges(topics={"calls.*": shared}))
        for topic in ("calls.a", "calls.b"):
            await mailbox.send_message(NewMessage(topic, b"", sticky_key="k"))
        (first,) = await mailbox.receive_messages("calls.a")
        assert await mailbox.receive_messages("calls.b") == []
        waiter = asyncio.create_task(mailbox.receive_messages("calls.b", wait_ms=LONG_MS // 2))
        await asyncio.sleep(0.05)
        assert not waiter.done()
        await first.ack()
        (second,) = await asyncio.wait_for(waiter, LONG_MS / 1_000)
        assert second.topic == "calls.b"

    async def test_limits_of_keys_without_fair_keys_are_refused(self, mailbox: Mailbox) -> None:
        with pytest.raises(InvalidRequest, match="needs fair_keys"):
            await mailbox.set_topic_policy("orders", {"max_in_flight_per_key": 1})
        await mailbox.set_topic_policy("orders", {"max_in_flight_per_key": 1, "fair_keys": True})
        with pytest.raises(InvalidRequest, match="needs fair_keys"):
            await mailbox.set_topic_policy("orders", {"fair_keys": False})

    async def test_weights_of_keys_are_set_together_and_an_empty_mapping_removes_them(
        self, mailbox: Mailbox
    ) -> None:
        odd = {"a:1": 3, 'b,"=': 2, "ü": 1_000, "": 1}
        await mailbox.set_topic_policy("orders", {"fair_keys": True, "key_weights": odd})
        assert (await mailbox.get_topic_policy("orders")).key_weights == odd
        (topic,) = await mailbox.list_topics()
        assert topic.policy is not None
        assert topic.policy.key_weights == odd
        await mailbox.set_topic_policy("orders", {"key_weights": {"a": 2}, "max_attempts": 3})
        policy = await mailbox.get_topic_policy("orders")
        assert (policy.key_weights, policy.max_attempts) == ({"a": 2}, 3)
        await mailbox.send_batch([message(b"%d" % n, sticky_key=key) for n, key in enumerate("aaab")])
        received = await mailbox.receive_messages("orders", max_messages=9)
        assert sorted(each.payload for each in received) == [b"0", b"1", b"2", b"3"]
        await mailbox.set_settings(
            SettingsChanges(topics={"*": {"key_weights": {"b": 9}, "fair_keys": True}})
        )
        await mailbox.set_topic_policy("orders", {"key_weights": {}})
        assert (await mailbox.get_topic_policy("orders")).key_weights == {}
        await mailbox.set_topic_policy("orders", {"key_weights": None})
        assert (await mailbox.get_topic_policy("orders")).key_weights == {"b": 9}
        for wrong in ({"a": 0}, {"a": 1_001}, {"a": "2"}, {"a": True}, 3):
            with pytest.raises(InvalidRequest):
                await mailbox.set_topic_policy("orders", {"key_weights": wrong})  # type: ignore[dict-item]
        assert (await mailbox.get_topic_policy("orders")).key_weights == {"b": 9}

    async def test_topic_and_payload_of_a_message_may_be_passed_by_position(self, mailbox: Mailbox) -> None:
        await mailbox.send_message(NewMessage("orders", b"1"))
        assert (await receive_one(mailbox)).payload == b"1"
        with pytest.raises(InvalidRequest, match="topic name must be of type str, not bytes"):
            await mailbox.send_message(NewMessage(b"1", "orders"))  # type: ignore[arg-type]

    async def test_the_explanation_of_a_ready_message_names_what_it_waits_for(self, mailbox: Mailbox) -> None:
        async def explain(policy: dict[str, int | bool]) -> str:
            await mailbox.set_topic_policy("orders", policy)
            return (await mailbox.explain_message(second.message_id)).now

        await mailbox.set_topic_policy("orders", {"ordered_keys": True, "dead_letters_hold_keys": True})
        await mailbox.send_message(message(sticky_key="k"))
        second = await mailbox.send_message(message(sticky_key="k"))
        first = await receive_one(mailbox)
        assert "earlier messages of its sticky key" in await explain({})
        limits = {"ordered_keys": False, "dead_letters_hold_keys": False, "fair_keys": True}
        assert "a limit of its sticky key" in await explain({**limits, "max_in_flight_per_key": 1})
        assert "a limit of its topic" in await explain({"max_in_flight": 1})
        assert "a limit of section orders allows" in await explain({"shared_limits": True})
        assert "for a consumer" in await explain({"max_in_flight": 2, "max_in_flight_per_key": 2})
        await first.reject()
        assert "dead letter" in await explain({"ordered_keys": True, "dead_letters_hold_keys": True})

    async def test_too_many_ids_are_refused_and_change_nothing(self, mailbox: Mailbox) -> None:
        sent = await mailbox.send_message(message())
        with pytest.raises(InvalidRequest, match="at most"):
            await mailbox.cancel_messages([sent.message_id] * 1_001)
        for ids in ([""], ["x" * 256], [7]):
            with pytest.raises(InvalidRequest):
                await mailbox.cancel_messages(ids)  # type: ignore[arg-type] # wrong on purpose
        assert (await receive_one(mailbox)).message_id == sent.message_id

    async def test_a_message_that_fails_is_delivered_again_before_later_ones_of_its_ordered_key(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", {"ordered_keys": True})
        await mailbox.send_batch([message(b"%d" % n, sticky_key="customer 7") for n in range(1, 6)])
        await mailbox.send_batch([message(b"other", sticky_key="customer 8"), message(b"none")])
        others = await mailbox.receive_messages("orders", max_messages=9)
        assert {each.payload for each in others} == {b"1", b"other", b"none"}
        handled = []
        for received in others:
            while received.payload.isdigit():
                handled.append(received.payload)
                if handled == [b"1", b"2"]:
                    await received.nack(delay_ms=0)
                else:
                    await received.ack()
                if received.payload == b"5":
                    break
                received = await receive_one(mailbox)
        assert handled == [b"1", b"2", b"2", b"3", b"4", b"5"]

    async def test_a_batch_of_an_ordered_key_is_acked_in_order_and_returns_behind_the_first_that_fails(
        self, mailbox: Mailbox
    ) -> None:
        await mailbox.set_topic_policy("orders", {"ordered_keys": True, "key_batch": 3})
        await mailbox.send_batch([message(b"%d" % n, sticky_key="k") for n in range(1, 6)])
        await mailbox.send_message(message(b"none"))
        received = await mailbox.receive_messages("orders", max_messages=9)
        keys = {each.payload: each.ordered_key for each in received}
        assert keys == {b"1": "k", b"2": "k", b"3": "k", b"none": None}
        first, second, third = (each for each in received if each.ordered_key)
        with pytest.raises(InvalidRequest, match="before the earlier messages of its sticky key"):
            await second.ack()
        assert await mailbox.ack_messages([first.receipt]) == [None]
        await second.nack(delay_ms=0)
        with pytest.raises(StaleReceipt):
            await third.ack()
        again = await mailbox.receive_messages("orders", max_messages=9)
        assert [(each.payload, each.attempt) for each in again] == [(b"2", 2), (b"3", 1), (b"4", 1)]
        assert await mailbox.ack_messages([each.receipt for each in again]) == [None] * 3
        assert (await receive_one(mailbox)).payload == b"5"

    async def test_only_the_dead_letters_that_hold_their_keys_are_listed_in_pages(
        self, mailbox: Mailbox
    ) -> None:
        policy = {"ordered_keys": True, "dead_letters_hold_keys": True}
        for topic in ("orders", "steps"):
            await mailbox.set_topic_policy(topic, policy if topic == "orders" else {"ordered_keys": True})
            for key in ("a", None, "b", "b", "b"):
                await mailbox.send_message(message(topic=topic, sticky_key=key))
            for received in await mailbox.receive_messages(topic, max_messages=9):
                await received.reject("no such customer")
        first = await mailbox.list_dead_letters(held_keys=True, limit=1)
        rest = await mailbox.list_dead_letters(held_keys=True, cursor=first.next_cursor)
        letters = (*first.items, *rest.items)
        assert sorted((each.topic, each.held_key, each.waiting) for each in letters) == [
            ("orders", "a", 0),
            ("orders", "b", 2),
        ]
        assert rest.next_cursor is None
        await mailbox.redrive_dead_letters("orders")
        assert (await mailbox.list_dead_letters(held_keys=True)).items == ()
        assert [each.held_key for each in (await mailbox.list_dead_letters("steps")).items] == [None] * 3

    async def test_a_dead_letter_holds_its_ordered_key_until_it_is_purged(self, mailbox: Mailbox) -> None:
        policy = {"ordered_keys": True, "dead_letters_hold_keys": True}
        await mailbox.set_topic_policy("orders", policy)
        await mailbox.send_batch([message(b"%d" % n, sticky_key="customer 7") for n in range(2)])
        await (await receive_one(mailbox)).reject("no such customer")
        assert await mailbox.receive_messages("orders") == []
        assert [each.held_keys for each in await mailbox.list_topics()] == [1]
        (letter,) = (await mailbox.list_dead_letters("orders")).items
        assert (letter.held_key, letter.waiting, letter.reason) == ("customer 7", 1, "rejected")
        await mailbox.purge_topic("orders")
        assert (await receive_one(mailbox)).payload == b"1"
