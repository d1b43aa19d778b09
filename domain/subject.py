"""Subjects of events, and their correlation: value objects of SDS-047 section 2.2.

A subject names the type of an event in the language of the domain; that brokers route by it is their concern.
"""

import re

import msgspec

from postroom.domain.errors import InvalidRequest

MAX_TOKEN_CHARS = 128
MAX_CORRELATION_CHARS = 255
_TOKEN = re.compile(rf"[\w-]{{1,{MAX_TOKEN_CHARS}}}\Z")
_CORRELATION = re.compile(rf"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{{1,{MAX_CORRELATION_CHARS}}}\Z")
_SUBJECT = re.compile(r"([^.]+)\.event\.([^.]+)\.v([1-9]\d{0,8})\Z")


def check_token(token: str, what: str) -> str:
    """Return a token of a subject, or raise `InvalidRequest`; `what` is its name in the error."""
    if not _TOKEN.match(token):
        raise InvalidRequest(
            f"{what} {token!r} can't be part of a subject; use 1 to {MAX_TOKEN_CHARS} letters, digits, _ or "
            "-, without dots, spaces or wildcards."
        )
    return token


class EventSubject(msgspec.Struct, frozen=True, gc=False):
    """Subject of events of one type: `{context}.event.{name}.v{n}` (SDS-047 `EventSubject`)."""

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
        """Parse a subject; raise `InvalidRequest` if it has another form."""
        match = _SUBJECT.match(subject)
        if match is None:
            raise InvalidRequest(
                f"The subject {subject!r} is not of the form {{context}}.event.{{name}}.v{{n}}, such as "
                "sea.event.order_placed.v1."
            )
        return cls(match[1], match[2], int(match[3]))


class CorrelationContext(msgspec.Struct, frozen=True, gc=False):
    """Ids of an event's conversation and of its cause, UUIDs or other text (SDS-047 `CorrelationContext`)."""

    correlation_id: str | None = None
    causation_id: str | None = None


def is_correlation_id(text: str) -> bool:
    """Return whether every target and CloudEvents accept a text as the id of a conversation or a cause."""
    return _CORRELATION.match(text) is not None
