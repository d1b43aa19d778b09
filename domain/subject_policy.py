"""Which messages are encrypted for whom, and which of their headers (ADR 0089)."""

from collections.abc import Mapping

import msgspec

from postroom.domain.arguments import check_items, check_text, check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import Headers
from postroom.domain.names import check_topic

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
    """Return policies by topic; `*` is that of the topics without one of their own.

    Raises: InvalidRequest naming what is of a wrong type or malformed.
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
