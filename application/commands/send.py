"""`SendMessage`, `SendBatch` and `SendEnvelopes`: put messages into a mailbox (svc-mailbox C-1 `SEND`)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from postroom.application.engine import Accepted, MailboxEngine
from postroom.application.messages import NewMessage, Sent
from postroom.application.prepare import Preparer
from postroom.domain.envelope.validation import EnvelopeProblem, ValidationMode, validate_envelope
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import Send
from postroom.domain.names import message_id

T = TypeVar("T")


class SendMessage:
    """Send one message and return when it is durable (svc-mailbox I-1, I-2)."""

    def __init__(self, engine: MailboxEngine, preparer: Preparer) -> None:
        self._send = SendBatch(engine, preparer)

    async def __call__(self, message: NewMessage) -> Sent:
        """Send `message`.

        Returns: its id, and whether the same message had been sent before.
        Raises: InvalidRequest, FrameTooLarge, IdempotencyConflict, Saturated, Unavailable.
        """
        (result,) = await self._send([message])
        if isinstance(result, Rejected):
            raise result
        return result


class SendBatch:
    """Send many messages in one append; each is accepted or refused by itself."""

    def __init__(self, engine: MailboxEngine, preparer: Preparer) -> None:
        self._engine = engine
        self._preparer = preparer

    async def __call__(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send `messages` and return an answer for each, in their order.

        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """
        return await _submit(self._engine, messages, self._preparer.message)


class SendEnvelopes:
    """Store `PrismEnvelope`s that come from elsewhere, byte for byte, validated first (RFC-037).

    Their message ids are idempotency keys for ever: an envelope whose id the log knows adds nothing.
    """

    def __init__(self, engine: MailboxEngine, preparer: Preparer) -> None:
        self._engine = engine
        self._preparer = preparer

    async def __call__(
        self,
        envelopes: Sequence[bytes],
        *,
        validation: ValidationMode = "strict",
        on_problem: Callable[[int, EnvelopeProblem], None] | None = None,
    ) -> list[Sent | Rejected]:
        """Store `envelopes` and return an answer for each, in their order.

        Arguments:
            validation: `strict` refuses what is malformed, `warn` stores it where it can, `disabled` looks at nothing.
            on_problem: is told the index and each problem found, whether it led to a refusal or not.

        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """
        index = -1

        def prepare(blob: bytes) -> Send:
            nonlocal index
            index += 1
            checked = validate_envelope(blob, validation)
            for problem in checked.problems:
                if on_problem is not None:
                    on_problem(index, problem)
            if not checked.is_accepted:
                raise InvalidRequest(" ".join(problem.message for problem in checked.problems))
            return self._preparer.envelope(blob)

        return await _submit(self._engine, envelopes, prepare)


async def _submit(
    engine: MailboxEngine, items: Sequence[T], prepare: Callable[[T], Send]
) -> list[Sent | Rejected]:
    results: list[Sent | Rejected] = []
    commands: list[Send] = []
    refused: dict[int, Rejected] = {}
    for index, item in enumerate(items):
        try:
            commands.append(prepare(item))
        except Rejected as rejection:
            refused[index] = rejection
    answers = iter(zip(commands, await engine.submit(commands), strict=True) if commands else ())
    for index in range(len(items)):
        if index in refused:
            results.append(refused[index])
            continue
        command, answer = next(answers)
        if isinstance(answer, Accepted):
            given = command.headers.message_id if answer.message == command.message else None
            results.append(Sent(message_id(answer.message, given), answer.duplicate))
        else:
            assert isinstance(answer, Rejected)
            results.append(answer)
    return results
