"""Messages that a client sends under its own ids, so that the server recognises a repetition."""

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeVar

from postroom.application.mailbox.settle import submit_valid
from postroom.application.messages import NewMessage, Sent
from postroom.domain.errors import Rejected

R = TypeVar("R", bound=Sent | Rejected)


class OutgoingMessage(NamedTuple):
    """A valid message with an id.

    Arguments:
        has_new_id: whether its id was made for this send; else it is the sender's own.
    """

    message: NewMessage
    has_new_id: bool

    def result(self, answer: R) -> R | Sent:
        """Return the result of its send; no duplicate if it is one of an earlier attempt of the same call."""
        if self.has_new_id and isinstance(answer, Sent) and answer.message_id == self.message.message_id:
            return Sent(answer.message_id, duplicate=False)
        return answer


async def send_outgoing(
    items: Sequence[object],
    prepare: Callable[[object], OutgoingMessage],
    send: Callable[[list[NewMessage]], Awaitable[list[Sent | Rejected]]],
) -> list[Sent | Rejected]:
    """Send the valid messages together, and return the result of each, in their order.

    Arguments:
        prepare: returns a message with an id, or raises Rejected.
        send: returns an answer for each message.
    """

    async def submit(outgoing: list[OutgoingMessage]) -> list[Sent | Rejected]:
        answers = await send([each.message for each in outgoing])
        return [each.result(answer) for each, answer in zip(outgoing, answers, strict=True)]

    return await submit_valid(items, prepare, submit)
