"""`SendMessage`, `SendBatch` and `SendEnvelopes`: send messages (svc-mailbox C-1 `SEND`)."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from postroom.application.mailbox.message_factory import MessageFactory, SendRequest
from postroom.application.mailbox.settle import submit_valid
from postroom.application.messages import NewMessage, Sent
from postroom.application.ports.event_log import Accepted, Answer, MailboxOwner
from postroom.application.ports.source import PayloadValidator
from postroom.application.tracing import SEND, tracer
from postroom.domain.arguments import check_items, check_optional_text, check_type
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
            (result,) = await _submit(self._owner, [self._factory.from_message(message)])
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
            if (requests := self._factory.from_batch(items)) is not None:
                return await _submit(self._owner, requests)
            return await submit_valid(items, self._factory.for_call(), partial(_submit, self._owner))


class SendEnvelopes:
    """Handler that validates external messages and stores them; `PrismEnvelope`s unchanged (RFC-037).

    Message ids are never reused: an envelope whose id is in the log is a duplicate.
    """

    def __init__(self, owner: MailboxOwner, factory: MessageFactory) -> None:
        self._owner = owner
        self._factory = factory

    async def __call__(
        self,
        envelopes: Sequence[bytes | NewMessage],
        *,
        sticky_keys: Sequence[str | None] = (),
        validation: ValidationMode = ValidationMode.STRICT,
        payloads: PayloadValidator | None = None,
        on_problem: Callable[[int, EnvelopeProblem], None] | None = None,
    ) -> list[Sent | Rejected]:
        """Store `envelopes` and return an answer for each, in their order.

        Arguments:
            envelopes: envelopes, or messages of another format.
            sticky_keys: one for each envelope, or none; envelopes with the same key share a shard.
            validation: `strict` refuses malformed envelopes, `warn` stores them if possible, `disabled`
                performs no checks.
            payloads: validator of payloads against the schemas of their topics; None validates none.
            on_problem: called with the index of an envelope and each of its problems, refused or not.

        Raises: InvalidRequest for an argument of a wrong type, Saturated when too many commands are pending,
            Unavailable when the outcome is unknown.
        """
        items = check_items("envelopes", envelopes)
        keys = _check_keys(sticky_keys, len(items))
        mode = _check_mode(validation)
        if payloads is not None and not callable(getattr(payloads, "validate", None)):
            raise InvalidRequest(f"payloads must be a PayloadValidator, not {type(payloads).__name__}.")
        if on_problem is not None and not callable(on_problem):
            raise InvalidRequest(f"on_problem must be callable, not {type(on_problem).__name__}.")
        index = -1

        def report(problem: EnvelopeProblem) -> None:
            if on_problem is not None:
                on_problem(index, problem)

        def request(item: object) -> SendRequest:
            nonlocal index
            index += 1
            external = None
            if type(item) is NewMessage:
                external = self._factory.from_event(item)
                blob = external.command.envelope
            else:
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
            return external or self._factory.from_envelope(blob, envelope, sticky_key=keys[index])

        return await submit_valid(items, request, partial(_submit, self._owner))


def topics_of(messages: Sequence[object]) -> Iterator[str]:
    """Yield the topics of new messages, for spans; objects of other types are skipped."""
    return (each.topic for each in messages if isinstance(each, NewMessage) and type(each.topic) is str)


def _check_keys(keys: Sequence[str | None], count: int) -> Sequence[str | None]:
    items = check_items("sticky_keys", keys)
    if items and len(items) != count:
        raise InvalidRequest(
            f"sticky_keys must have one key for each of {count} envelopes; it has {len(items)}."
        )
    return [check_optional_text("sticky_key", key) for key in items] or [None] * count


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


async def _submit(owner: MailboxOwner, requests: list[SendRequest]) -> list[Sent | Rejected]:
    """Submit the commands of requests, and return an answer for each."""
    answers = await owner.submit([request.command for request in requests])
    return [
        Sent(request.message_id, answer.duplicate)
        if type(answer) is Accepted and answer.message == request.command.message
        else await _original(answer, owner)
        for request, answer in zip(requests, answers, strict=True)
    ]


async def _original(answer: Answer, owner: MailboxOwner) -> Sent | Rejected:
    """Return the message that a send repeated, or why the send was refused."""
    if type(answer) is not Accepted:
        assert isinstance(answer, Rejected)
        return answer
    if is_name_based(answer.message):  # the original is durable, as answers wait for earlier appends
        return Sent(await owner.find_message_id(answer.message), answer.duplicate)
    return Sent(message_id(answer.message), answer.duplicate)
