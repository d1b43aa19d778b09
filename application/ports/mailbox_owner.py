"""Port: the owner of a mailbox, which decides commands; in this process or in another."""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from postroom.application.messages import MessageDelivery
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.commands import Command, Receive


class Accepted(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Answer to `Send`: the message's stream id, and whether the send was a duplicate (svc-mailbox I-2)."""

    message: bytes
    duplicate: bool


Answer = Accepted | list[MessageDelivery] | int | Rejected
"""Answer to a command: of `Send`, of `Receive`, the number of events of any other, or its refusal."""


class MailboxOwner(Protocol):
    """Owner of a mailbox, as the command handlers use it."""

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""

    async def submit(self, commands: Sequence[Command]) -> Sequence[Answer]:
        """Decide commands in order and return their answers when their events are durable.

        Returns: an answer for each command; `Rejected` for a refused one.
        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """

    async def receive(
        self, command: Receive, wait_ms: int, *, is_stream: bool = False
    ) -> list[MessageDelivery]:
        """Deliver ready messages; without any, wait up to `wait_ms` for one.

        Arguments:
            is_stream: return what is unsettled when the connection of the receiver's process ends.

        Raises: Rejected, Unavailable.
        """

    async def find_message_id(self, stream: bytes) -> str:
        """Return the id under which the message of this stream id was sent."""
