"""`SendMessage`, `SendBatch` and `SendEnvelopes`: put messages into a mailbox (svc-mailbox C-1 `SEND`)."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from postroom.application.engine import Accepted, Answer, MailboxEngine
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.prepare import Prepared, Preparer
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import (
    EnvelopeProblem,
    ProblemKind,
    ValidationMode,
    check_envelope,
)
from postroom.domain.errors import InvalidRequest, Rejected
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
        validation: ValidationMode = ValidationMode.STRICT,
        payloads: PayloadValidator | None = None,
        on_problem: Callable[[int, EnvelopeProblem], None] | None = None,
    ) -> list[Sent | Rejected]:
        """Store `envelopes` and return an answer for each, in their order.

        Arguments:
            validation: `strict` refuses what is malformed, `warn` stores it where it can, `disabled` looks
                at nothing.
            payloads: checks payloads against the schemas of their topics; None checks none.
            on_problem: is told the index and each problem found, whether it led to a refusal or not.

        Raises: Saturated when too many commands are pending, Unavailable when the outcome is unknown.
        """
        index = -1

        def tell(problem: EnvelopeProblem) -> None:
            if on_problem is not None:
                on_problem(index, problem)

        def prepare(blob: bytes) -> Prepared:
            nonlocal index
            index += 1
            try:
                envelope = parse_envelope(blob)
            except InvalidRequest as error:
                tell(EnvelopeProblem(ProblemKind.UNREADABLE, str(error)))
                raise
            problems, is_accepted = _check(envelope, validation, payloads)
            for problem in problems:
                tell(problem)
            if not is_accepted:
                raise InvalidRequest(" ".join(problem.message for problem in problems))
            return self._preparer.envelope(blob, envelope)

        return await _submit(self._engine, envelopes, prepare)


def _check(
    envelope: PrismEnvelope, validation: ValidationMode, payloads: PayloadValidator | None
) -> tuple[tuple[EnvelopeProblem, ...], bool]:
    """Return what is wrong with an envelope and its payload, and whether it is accepted all the same."""
    checked = check_envelope(envelope, validation)
    if payloads is None or not checked.is_accepted:
        return checked.problems, checked.is_accepted
    payload = payloads.validate(envelope)
    found = tuple(EnvelopeProblem(ProblemKind.INVALID_PAYLOAD, problem) for problem in payload.problems)
    return checked.problems + found, payload.is_accepted


async def _submit(
    engine: MailboxEngine, items: Sequence[T], prepare: Callable[[T], Prepared]
) -> list[Sent | Rejected]:
    prepared: list[Prepared | Rejected] = []
    for item in items:
        try:
            prepared.append(prepare(item))
        except Rejected as rejection:
            prepared.append(rejection)
    commands = [each[0] for each in prepared if type(each) is tuple]
    answers = iter(await engine.submit(commands) if commands else ())
    return [each if isinstance(each, Rejected) else _sent(each, next(answers)) for each in prepared]


def _sent(prepared: Prepared, answer: Answer) -> Sent | Rejected:
    if type(answer) is Accepted:
        command, shown = prepared
        is_own = answer.message == command.message
        return Sent(shown if is_own else message_id(answer.message), answer.duplicate)
    assert isinstance(answer, Rejected)
    return answer
