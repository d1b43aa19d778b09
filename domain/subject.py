"""Subjects of events, and what else travels beside an event's payload (SDS-047 section 2.2)."""

import re
from uuid import UUID

import msgspec

from postroom.domain.errors import InvalidRequest

MAX_TOKEN_CHARS = 128
_TOKEN = re.compile(rf"[\w-]{{1,{MAX_TOKEN_CHARS}}}\Z")
_SUBJECT = re.compile(r"([^.]+)\.event\.([^.]+)\.v([1-9]\d{0,8})\Z")


def check_token(token: str, what: str) -> str:
    """Return one word of a subject, or raise `InvalidRequest`; `what` it is for is told then."""
    if not _TOKEN.match(token):
        raise InvalidRequest(
            f"{what} {token!r} can't be part of a subject; use 1 to {MAX_TOKEN_CHARS} letters, digits, _ or "
            "-, without dots, spaces or wildcards."
        )
    return token


class EventSubject(msgspec.Struct, frozen=True, gc=False):
    """Name where events of one kind are published: `{context}.event.{name}.v{n}` (SDS-047 `EventSubject`)."""

    context: str
    name: str
    version: int

    def __post_init__(self) -> None:
        check_token(self.context, "The context")
        check_token(self.name, "The event type")
        if not 1 <= self.version < 10**9:
            raise InvalidRequest(f"The version of {self.name} must be at least 1; it was {self.version}.")

    @property
    def value(self) -> str:
        """Return the subject as text."""
        return f"{self.context}.event.{self.name}.v{self.version}"

    @classmethod
    def parse(cls, subject: str) -> "EventSubject":
        """Return what a subject says, or raise `InvalidRequest` for one of another form."""
        match = _SUBJECT.match(subject)
        if match is None:
            raise InvalidRequest(
                f"The subject {subject!r} is not of the form {{context}}.event.{{name}}.v{{n}}, such as "
                "sea.event.order_placed.v1."
            )
        return cls(match[1], match[2], int(match[3]))


class CorrelationContext(msgspec.Struct, frozen=True, gc=False):
    """Say which conversation an event belongs to and what caused it (SDS-047 `CorrelationContext`)."""

    correlation_id: UUID | None = None
    causation_id: UUID | None = None


class NatsMsgId(msgspec.Struct, frozen=True, gc=False):
    """Hold what JetStream deduplicates by: the id of the outbox event, in its usual form (`NatsMsgId`)."""

    value: str

    def __post_init__(self) -> None:
        try:
            is_canonical = str(UUID(self.value)) == self.value
        except ValueError:
            is_canonical = False
        if not is_canonical:
            raise InvalidRequest(f"A Nats-Msg-Id is the UUID of an outbox event; {self.value!r} is none.")

    @classmethod
    def of(cls, outbox_id: UUID) -> "NatsMsgId":
        """Return the message id under which an outbox event is published."""
        return cls(str(outbox_id))
