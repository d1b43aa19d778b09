"""`SendMessage`, `SendBatch` and `SendEnvelopes`: send messages (svc-mailbox C-1 `SEND`)."""

from collections.abc import Callable, Iterator, Sequence

from postroom.application.mailbox.message_factory import MessageFactory, SendRequest
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.mailbox_owner import Accepted, Answer, MailboxOwner
from postroom.application.ports.payload_validator import PayloadValidator
from postroom.application.tracing import SEND, tracer
from postroom.domain.arguments import check_items, check_type
from postroom.domain.envelope.headers import parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import (
    EnvelopeProblem,
    ProblemKind,
    ValidationMode,
    check_envelope,
)
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.names import is_name_based, message_id


class SendMessage:
    """Handler that sends one message and returns when it is durable (svc-mailbox I-1, I-2)."""

    def __init__(self, owner: MailboxOwner, factory: MessageFactory) -> None:
        self._owner = owner
        self._factory = factory

    async def __call__(self, message: NewMessage) -> Sent:
        """Send `message`.

        Returns: its id, and whether the send was a duplicate.
        Raises: InvalidRequest, FrameTooLarge, IdempotencyConflict, Saturated, Unavailable.
        """
        with tracer().span(SEND, topics_of((message,))) as span:
            request = self._factory.from_message(message)
            (answer,) = await self._owner.submit((request.command,))
            result = await _sent(request, answer, self._owner)
            if isinstance(result, Rejected):
                raise result
            span.set("messaging.message.id", result.message_id)
            return result


class SendBatch:
    """Handler that sends many messages in one append; each is accepted or refused individually."""

    def __init__(self, owner: MailboxOwner, factory: MessageFactory) -> None:
        self._owner = owner
        self._factory = factory

    async def __call__(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send `messages` and return an answer for each, in their order.

        Raises: InvalidRequest unless `messages` is a list, Saturated when too many commands are pending,
            Unavailable when the outcome is unknown.
        """
        items = check_items("messages", messages)
        with tracer().span(SEND, topics_of(items), count=len(items)):
            return await _submit(self._owner, self._factory.from_messages(items))


class SendEnvelopes:
    """Handler that validates external `PrismEnvelope`s and stores them unchanged (RFC-037).

    Message ids are never reused: an envelope whose id is in the log is a duplicate.
    """

    def __init__(self, owner: MailboxOwner, factory: MessageFactory) -> None:
        self._owner = owner
        self._factory = factory

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
            validation: `strict` refuses malformed envelopes, `warn` stores them if possible, `disabled`
                performs no checks.
            payloads: validator of payloads against the schemas of their topics; None validates none.
            on_problem: called with the index of an envelope and each of its problems, refused or not.

        Raises: InvalidRequest for an argument of a wrong type, Saturated when too many commands are pending,
            Unavailable when the outcome is unknown.
        """
        items = check_items("envelopes", envelopes)
        mode = _check_mode(validation)
        if payloads is not None and not callable(getattr(payloads, "validate", None)):
            raise InvalidRequest(f"payloads must be a PayloadValidator, not {type(payloads).__name__}.")
        if on_problem is not None and not callable(on_problem):
            raise InvalidRequest(f"on_problem must be callable, not {type(on_problem).__name__}.")
        requests: list[SendRequest | Rejected] = []

        def report(problem: EnvelopeProblem) -> None:
            if on_problem is not None:
                on_problem(len(requests), problem)

        for item in items:
            try:
                requests.append(self._from_envelope(item, mode, payloads, report))
            except Rejected as rejection:
                requests.append(rejection)
        return await _submit(self._owner, requests)

    def _from_envelope(
        self,
        item: object,
        mode: ValidationMode,
        payloads: PayloadValidator | None,
        report: Callable[[EnvelopeProblem], None],
    ) -> SendRequest:
        blob = check_type("An envelope", item, bytes)
        try:
            envelope = parse_envelope(blob)
        except InvalidRequest as error:
            report(EnvelopeProblem(ProblemKind.UNREADABLE, str(error)))
            raise
        problems, is_accepted = _check(envelope, mode, payloads)
        for problem in problems:
            report(problem)
        if not is_accepted:
            raise InvalidRequest(" ".join(problem.message for problem in problems))
        return self._factory.from_envelope(blob, envelope)


def topics_of(messages: Sequence[object]) -> Iterator[str]:
    """Yield the topics of new messages, for spans; objects of other types are skipped."""
    return (each.topic for each in messages if isinstance(each, NewMessage) and type(each.topic) is str)


def _check_mode(validation: str) -> ValidationMode:
    try:
        return ValidationMode(validation)
    except ValueError:
        modes = ", ".join(ValidationMode)
        raise InvalidRequest(f"validation must be one of {modes}.") from None


def _check(
    envelope: PrismEnvelope, validation: ValidationMode, payloads: PayloadValidator | None
) -> tuple[tuple[EnvelopeProblem, ...], bool]:
    """Return the problems of an envelope and its payload, and whether it is accepted."""
    result = check_envelope(envelope, validation)
    if payloads is None or not result.is_accepted:
        return result.problems, result.is_accepted
    payload = payloads.validate(envelope)
    problems = tuple(EnvelopeProblem(ProblemKind.INVALID_PAYLOAD, problem) for problem in payload.problems)
    return result.problems + problems, payload.is_accepted


async def _submit(owner: MailboxOwner, requests: Sequence[SendRequest | Rejected]) -> list[Sent | Rejected]:
    """Submit the commands of requests that are not refused; return an answer for each request."""
    commands = [each.command for each in requests if type(each) is SendRequest]
    answers = iter(await owner.submit(commands) if commands else ())
    results: list[Sent | Rejected] = []
    for each in requests:
        if isinstance(each, Rejected):
            results.append(each)
            continue
        answer = next(answers)
        if type(answer) is Accepted and answer.message == each.command.message:
            results.append(Sent(each.message_id, answer.duplicate))
        else:
            results.append(await _sent(each, answer, owner))
    return results


async def _sent(request: SendRequest, answer: Answer, owner: MailboxOwner) -> Sent | Rejected:
    if type(answer) is not Accepted:
        assert isinstance(answer, Rejected)
        return answer
    if answer.message == request.command.message:
        return Sent(request.message_id, answer.duplicate)
    if is_name_based(answer.message):  # the original is durable, as answers wait for earlier appends
        return Sent(await owner.find_message_id(answer.message), answer.duplicate)
    return Sent(message_id(answer.message), answer.duplicate)
