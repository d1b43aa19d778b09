"""What every mailbox refuses; a part of `MailboxConformance`."""

from typing import Any

import pytest

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest, NotFound, Rejected
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from tests.support.stores import message

INVALID: list[Any] = [None, 5, b"bytes", object(), [], {"topic": "orders"}]
NO_NUMBERS: list[Any] = [None, "1", 1.5, True, object(), -1, 1 << 70]


class MailboxRefusalConformance:
    async def test_what_does_not_exist_is_not_found(self, mailbox: Mailbox) -> None:
        with pytest.raises(NotFound, match="has no message nowhere"):
            await mailbox.get_message("nowhere")
        with pytest.raises(NotFound, match="has no topic nowhere"):
            await mailbox.purge_topic("nowhere")
        with pytest.raises(NotFound, match="has no topic nowhere"):
            await mailbox.pause_topic("nowhere")
        with pytest.raises(NotFound, match="has no topic nowhere"):
            await mailbox.resume_topic("nowhere")
        (answer,) = await mailbox.ack_messages([Receipt(b"m" * 16, 1, 1)])
        assert isinstance(answer, NotFound)

    @pytest.mark.parametrize("number", range(len(INVALID)))
    async def test_an_argument_of_a_wrong_type_is_refused_and_changes_nothing(
        self, mailbox: Mailbox, number: int
    ) -> None:
        value = INVALID[number]
        position = (await mailbox.get_backlog()).position
        for call in (
            mailbox.send_message(value),
            mailbox.send_message(message(topic=value)),
            mailbox.receive_messages(value),
            mailbox.redrive_dead_letters(value),
            mailbox.set_topic_policy("orders", value),
            mailbox.pause_topic(value),
            mailbox.resume_topic(value),
            mailbox.get_message(value),
            mailbox.get_topic_policy(value),
            mailbox.peek_messages(value),
        ):
            with pytest.raises(InvalidRequest):
                await call
        answers = [*await mailbox.send_batch([value]), *await mailbox.ack_messages([value])]
        assert all(isinstance(answer, InvalidRequest) for answer in answers), answers
        assert (await mailbox.get_backlog()).position == position

    @pytest.mark.parametrize("number", range(len(NO_NUMBERS)))
    async def test_a_number_of_a_wrong_type_or_out_of_range_is_refused_and_changes_nothing(
        self, mailbox: Mailbox, number: int
    ) -> None:
        value = NO_NUMBERS[number]
        await mailbox.send_message(message())
        position = (await mailbox.get_backlog()).position
        for call in (
            mailbox.receive_messages("orders", max_messages=value),
            mailbox.receive_messages("orders", max_bytes=value),
            mailbox.receive_messages("orders", wait_ms=value),
            mailbox.extend_visibility([], value),
            mailbox.redrive_dead_letters("orders", limit=value),
            mailbox.list_dead_letters(limit=value),
            mailbox.peek_messages("orders", limit=value),
            mailbox.delete_old_events(value),
        ):
            with pytest.raises(InvalidRequest):
                await call
        assert (await mailbox.get_backlog()).position == position

    @pytest.mark.parametrize("cursor", ["", "next", "-1", "1.5", str(1 << 70), "1" * 300, "\u0663", 1, True])
    async def test_a_cursor_that_no_page_had_is_refused(self, mailbox: Mailbox, cursor: Any) -> None:
        with pytest.raises(InvalidRequest):
            await mailbox.list_dead_letters(cursor=cursor)

    async def test_more_messages_than_any_limit_are_refused(self, mailbox: Mailbox) -> None:
        with pytest.raises(InvalidRequest, match="max_messages"):
            await mailbox.receive_messages("orders", max_messages=1 << 31)

    async def test_dots_are_names_like_any_other(self, mailbox: Mailbox) -> None:
        for name in (".", ".."):
            await mailbox.send_message(message(message_id=name))
            assert (await mailbox.explain_message(name)).message_id == name
            assert await mailbox.get_topic_policy(name) == TopicPolicy()

    async def test_a_refusal_has_its_code_and_status(self, mailbox: Mailbox) -> None:
        with pytest.raises(Rejected) as refused:
            await mailbox.receive_messages("no spaces")
        assert (refused.value.code, refused.value.status) == ("E_SCHEMA", 400)
