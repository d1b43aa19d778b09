"""Groups of commands whose events are appended together, and their answers."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from postroom.application.mailbox.group_events import GroupEvents
from postroom.application.mailbox.loaded_mailbox import LoadedMailbox
from postroom.application.ports.mailbox_owner import Answer
from postroom.domain.errors import IntegrityFailure, PostroomError
from postroom.domain.mailbox.commands import (
    Ack,
    Command,
    Extend,
    Nack,
    Pause,
    Purge,
    Receive,
    Redrive,
    Resume,
    Send,
    SetPolicy,
)
from postroom.domain.message import Receipt


class Request(NamedTuple):
    """Commands of one caller, and the future of their answers.

    Arguments:
        is_repeated: whether they were decided before.
    """

    commands: Sequence[Command]
    answers: "asyncio.Future[list[Answer]]"
    is_repeated: bool = False

    def for_retry(self) -> "Request":
        """Return the request to be decided again, with a lookup of the ids of its sends."""
        return self._replace(commands=[as_known(each) for each in self.commands], is_repeated=True)


class Group(NamedTuple):
    """Requests decided together, to be answered when the append of their events is durable.

    Arguments:
        state: the state they were decided on; if it is void, so is the group.
        answers: of each request, or the error that stopped it before any of its commands was decided.
    """

    requests: list[Request]
    state: LoadedMailbox
    answers: list[list[Answer] | IntegrityFailure]
    events: GroupEvents

    def answer(self) -> None:
        """Send every caller its answers."""
        for request, answers in zip(self.requests, self.answers, strict=True):
            # The caller may have stopped waiting; its commands have still taken effect.
            if request.answers.done():
                continue
            if isinstance(answers, IntegrityFailure):
                request.answers.set_exception(answers)
            else:
                request.answers.set_result(answers)


COST_BYTES = 4_096
"""Envelope bytes that cost as much as a command."""


def topic_of(commands: Sequence[Command], state: LoadedMailbox | None) -> str:
    """Return the topic to which a request counts: that of its first command; empty if it has none."""
    command = commands[0]
    match command:
        case Send() | Redrive() | Purge() | SetPolicy() | Pause() | Resume():
            return command.topic
        case Receive(topics=(topic, *_)):
            return topic
        case (
            Ack(receipt=Receipt(message=bytes(stream)))
            | Nack(receipt=Receipt(message=bytes(stream)))
            | Extend(receipt=Receipt(message=bytes(stream)))
        ) if state is not None:
            message = state.mailbox.messages.get(stream)
            return message.topic if message is not None else ""
        case _:
            return ""


def cost_of(commands: Sequence[Command]) -> int:
    """Return the cost of a request: one for each command, and one for each 4 KiB of their envelopes."""
    return len(commands) + sum(
        [len(command.envelope) // COST_BYTES for command in commands if type(command) is Send]
    )


def as_known(command: Command) -> Command:
    """Return a command to be repeated: the id of a send is then looked up in the log."""
    return msgspec.structs.replace(command, has_external_id=True) if isinstance(command, Send) else command


def refuse(requests: Iterable[Request], error: PostroomError) -> None:
    """Answer every caller with `error`."""
    for request in requests:
        if not request.answers.done():
            request.answers.set_exception(error)
