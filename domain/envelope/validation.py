"""Structural validation of envelopes before they are stored (RFC-037 schema validation)."""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from postroom.domain.envelope.build import ENVELOPE_VERSION
from postroom.domain.envelope.headers import is_valid_timestamp, parse_envelope
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope, PrismMetadata
from postroom.domain.errors import InvalidRequest

__all__ = [
    "EnvelopeProblem",
    "EnvelopeValidation",
    "ProblemKind",
    "ValidationMode",
    "check_envelope",
    "validate_envelope",
]


class ValidationMode(StrEnum):
    """How problems of an envelope are handled (RFC-037 schema enforcement modes)."""

    STRICT = "strict"  # refuse the envelope
    WARN = "warn"  # store it, report the problems
    DISABLED = "disabled"  # store it unchecked


class ProblemKind(StrEnum):
    """Kind of a problem of an envelope."""

    UNREADABLE = "unreadable"
    UNSUPPORTED_VERSION = "unsupported_version"
    MISSING_METADATA = "missing_metadata"
    MISSING_MESSAGE_ID = "missing_message_id"
    MISSING_TOPIC = "missing_topic"
    MISSING_TIMESTAMP = "missing_timestamp"
    INVALID_TIMESTAMP = "invalid_timestamp"
    INVALID_PAYLOAD = "invalid_payload"


# Reported in strict mode, but not refused: compatible fields of a newer version are read, and the time of
# arrival replaces a missing publish time.
_WARNINGS = frozenset({ProblemKind.UNSUPPORTED_VERSION, ProblemKind.MISSING_TIMESTAMP})


class EnvelopeProblem(msgspec.Struct, frozen=True):
    """A problem of an envelope, in one sentence.

    Arguments:
        kind: for programs.
        message: for people.
    """

    kind: ProblemKind
    message: str


class EnvelopeValidation(msgspec.Struct, frozen=True):
    """Whether an envelope is accepted, and its problems."""

    is_accepted: bool
    problems: tuple[EnvelopeProblem, ...] = ()


_WITHOUT_PROBLEMS = EnvelopeValidation(True)


def validate_envelope(blob: bytes, mode: ValidationMode = ValidationMode.STRICT) -> EnvelopeValidation:
    """Validate a serialized envelope (RFC-037 schema validation, steps 1 to 3).

    Bytes that can't be parsed are refused in every mode (RFC-037 error handling: skip, with a warning).
    """
    try:
        envelope = parse_envelope(blob)
    except InvalidRequest as error:
        return EnvelopeValidation(False, (EnvelopeProblem(ProblemKind.UNREADABLE, str(error)),))
    return check_envelope(envelope, mode)


def check_envelope(
    envelope: PrismEnvelope, mode: ValidationMode = ValidationMode.STRICT
) -> EnvelopeValidation:
    """Validate a parsed envelope; see `validate_envelope`."""
    if mode == ValidationMode.DISABLED or not _has_problems(envelope):
        return _WITHOUT_PROBLEMS
    problems = tuple(_problems(envelope))
    is_valid = all(problem.kind in _WARNINGS for problem in problems)
    return EnvelopeValidation(is_valid or mode == ValidationMode.WARN, problems)


def _has_problems(envelope: PrismEnvelope) -> bool:
    """Return whether `_problems` yields any, at a third of its cost."""
    metadata = envelope.metadata  # an absent one reads as empty
    return not (
        envelope.envelope_version == ENVELOPE_VERSION
        and metadata.message_id
        and metadata.topic
        and metadata.HasField("published_at")
        and is_valid_timestamp(metadata.published_at)
    )


def _problems(envelope: PrismEnvelope) -> Iterator[EnvelopeProblem]:
    if envelope.envelope_version != ENVELOPE_VERSION:
        yield EnvelopeProblem(
            ProblemKind.UNSUPPORTED_VERSION,
            f"The envelope has version {envelope.envelope_version}, not {ENVELOPE_VERSION}: "
            "newer fields are stored but not indexed.",
        )
    if envelope.HasField("metadata"):
        yield from _metadata_problems(envelope.metadata)
    else:
        yield EnvelopeProblem(
            ProblemKind.MISSING_METADATA,
            "The envelope has no metadata; set at least metadata.message_id and metadata.topic.",
        )


def _metadata_problems(metadata: PrismMetadata) -> Iterator[EnvelopeProblem]:
    if not metadata.message_id:
        yield EnvelopeProblem(
            ProblemKind.MISSING_MESSAGE_ID,
            "The envelope has no message id; set metadata.message_id to a unique id.",
        )
    if not metadata.topic:
        yield EnvelopeProblem(ProblemKind.MISSING_TOPIC, "The envelope has no topic; set metadata.topic.")
    if not metadata.HasField("published_at"):
        yield EnvelopeProblem(
            ProblemKind.MISSING_TIMESTAMP,
            "The envelope has no publish time, so its time of arrival is used; set metadata.published_at.",
        )
    elif not is_valid_timestamp(metadata.published_at):
        time = metadata.published_at
        yield EnvelopeProblem(
            ProblemKind.INVALID_TIMESTAMP,
            f"The publish time, {time.seconds} s and {time.nanos} ns, is outside years 1 to 9999; "
            "set metadata.published_at to seconds since 1970 UTC and 0 to 999,999,999 ns.",
        )
