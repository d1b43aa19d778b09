"""Attempts of a call: what the last answer says of the earlier ones."""

from typing import Any, cast

import pytest
from uuid_utils import uuid7

from postroom.application.mailbox_client import MailboxClient, MailboxTransport
from postroom.application.messages import NewMessage
from postroom.domain.errors import PostroomError, Saturated, Unavailable, WrongOwner
from tests.support.messages import MAILBOX, message


class MovingMailbox:
    """Transport to a process that owns the mailbox no more, after some attempts that failed."""

    where = "grpc://host:7070"

    def __init__(self, *failures: PostroomError) -> None:
        self._failures = iter(failures)

    async def send(self, _: NewMessage) -> Any:
        raise next(self._failures, WrongOwner(MAILBOX))


async def send(*failures: PostroomError) -> None:
    transport = cast(MailboxTransport, MovingMailbox(*failures))
    await MailboxClient(transport, MAILBOX, 60_000, uuid7).send_message(message(b"hello"))


async def test_a_call_to_another_process_than_the_owner_took_no_effect() -> None:
    with pytest.raises(WrongOwner):
        await send()
    with pytest.raises(WrongOwner):
        await send(Saturated("full", 1))


async def test_a_refusal_by_a_former_owner_leaves_an_earlier_attempt_unknown() -> None:
    with pytest.raises(Unavailable, match="whether an earlier attempt of the call took effect is unknown"):
        await send(Unavailable("it ended", 1))
