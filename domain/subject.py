"""Subjects of events, their correlation, and policies by subject (SDS-047 section 2.2).

A subject names the type of an event in the language of the domain; that brokers route by it is their concern.
"""

import re
from collections.abc import Mapping

import msgspec

from postroom.domain.arguments import check_items, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers
from postroom.domain.names import check_topic

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


ALGORITHM = "postroom-aes-siv"
"""Algorithm of the messages that Postroom encrypts, in their header `encryption`."""

ATTRS = "attrs."
"""Prefix of the fields that are attributes."""
HEADERS = ("principal", "correlation_id", "causality_parent")
"""Headers that may name a subject or be encrypted, besides attributes."""
ANY_TOPIC = "*"


class SubjectPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Encryption of the messages of a topic.

    Arguments:
        subject: field that names the subject: `principal`, `correlation_id`, `causality_parent` or
            `attrs.NAME`. In its place, the subject's pseudonym is stored.
        encrypt: other fields that are encrypted; the payload always is.
    """

    subject: str
    encrypt: tuple[str, ...] = ()

    def validate(self, name: str) -> "SubjectPolicy":
        """Return the policy, or raise InvalidRequest.

        Arguments:
            name: of the topic, for the error.
        """
        fields = [self.subject, *check_items(f"encrypt of topic {name}", self.encrypt)]
        checked = [_check_field(f"A field of topic {name}", field) for field in fields]
        if len(set(checked)) < len(checked):
            raise InvalidRequest(f"The fields of topic {name} must differ; encrypt leaves out the subject.")
        return SubjectPolicy(checked[0], tuple(checked[1:]))


def is_encrypted(headers: Headers) -> bool:
    """Return whether Postroom encrypted the message, by its headers."""
    return headers.encryption == ALGORITHM


def find_policy(policies: Mapping[str, SubjectPolicy], topic: str) -> SubjectPolicy | None:
    """Return the policy of a topic, or None if its messages are not encrypted."""
    return policies.get(topic) or policies.get(ANY_TOPIC) if policies else None


def check_subject_policies(topics: object) -> dict[str, SubjectPolicy]:
    """Return policies by topic; `*` applies to topics without a policy of their own.

    Raises: InvalidRequest naming the argument of a wrong type or malformed.
    """
    if not isinstance(topics, Mapping):
        raise InvalidRequest(f"topics must be a mapping of policies, not {type(topics).__name__}.")
    if not topics:
        raise InvalidRequest("topics must have the policy of at least one topic, or of all topics as '*'.")
    return {
        name if name == ANY_TOPIC else check_topic(name): check_type(
            f"The policy of topic {name}", policy, SubjectPolicy
        ).validate(name)
        for name, policy in topics.items()
    }


def _check_field(name: str, field: object) -> str:
    text = check_text(name, field, 1)
    if text in HEADERS or (text.startswith(ATTRS) and text != ATTRS):
        return text
    raise InvalidRequest(f"{name} must be {', '.join(HEADERS)} or {ATTRS}NAME; it was {text!r}.")
