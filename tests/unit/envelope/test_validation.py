from collections.abc import Callable

import pytest

from postroom.domain.envelope.headers import extract_mailbox_item
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.envelope.validation import ProblemKind, ValidationMode, validate_envelope


def valid_envelope() -> PrismEnvelope:
    envelope = PrismEnvelope(envelope_version=1)
    envelope.metadata.message_id = "msg-1"
    envelope.metadata.topic = "orders.created"
    envelope.metadata.published_at.seconds = 1_760_000_000
    return envelope


def set_version(envelope: PrismEnvelope) -> None:
    envelope.envelope_version = 2


def clear_metadata(envelope: PrismEnvelope) -> None:
    envelope.ClearField("metadata")


def clear_message_id(envelope: PrismEnvelope) -> None:
    envelope.metadata.ClearField("message_id")


def clear_topic(envelope: PrismEnvelope) -> None:
    envelope.metadata.ClearField("topic")


def clear_time(envelope: PrismEnvelope) -> None:
    envelope.metadata.ClearField("published_at")


def set_late_time(envelope: PrismEnvelope) -> None:
    envelope.metadata.published_at.seconds = 253_402_300_800


def set_bad_nanos(envelope: PrismEnvelope) -> None:
    envelope.metadata.published_at.nanos = 1_000_000_000


FAULTS: list[tuple[Callable[[PrismEnvelope], None], ProblemKind]] = [
    (clear_metadata, ProblemKind.MISSING_METADATA),
    (clear_message_id, ProblemKind.MISSING_MESSAGE_ID),
    (clear_topic, ProblemKind.MISSING_TOPIC),
    (set_late_time, ProblemKind.INVALID_TIMESTAMP),
    (set_bad_nanos, ProblemKind.INVALID_TIMESTAMP),
]
WARNINGS: list[tuple[Callable[[PrismEnvelope], None], ProblemKind]] = [
    (set_version, ProblemKind.UNSUPPORTED_VERSION),
    (clear_time, ProblemKind.MISSING_TIMESTAMP),
]


def broken(fault: Callable[[PrismEnvelope], None]) -> bytes:
    envelope = valid_envelope()
    fault(envelope)
    return envelope.SerializeToString()


@pytest.mark.parametrize("mode", ValidationMode)
def test_a_valid_envelope_is_accepted_without_problems_in_every_mode(mode: ValidationMode) -> None:
    result = validate_envelope(valid_envelope().SerializeToString(), mode)
    assert (result.is_accepted, result.problems) == (True, ())


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_fault_is_refused_in_strict_mode(fault: Callable[[PrismEnvelope], None], kind: ProblemKind) -> None:
    result = validate_envelope(broken(fault))
    assert not result.is_accepted
    assert [problem.kind for problem in result.problems] == [kind]


@pytest.mark.parametrize(("fault", "kind"), FAULTS)
def test_a_fault_is_reported_but_stored_in_warn_mode(
    fault: Callable[[PrismEnvelope], None], kind: ProblemKind
) -> None:
    result = validate_envelope(broken(fault), ValidationMode.WARN)
    assert result.is_accepted
    assert [problem.kind for problem in result.problems] == [kind]
    assert extract_mailbox_item(broken(fault)).message_id


@pytest.mark.parametrize(("fault", "kind"), WARNINGS)
def test_a_newer_version_or_a_missing_time_is_reported_but_never_refused(
    fault: Callable[[PrismEnvelope], None], kind: ProblemKind
) -> None:
    for mode in (ValidationMode.STRICT, ValidationMode.WARN):
        result = validate_envelope(broken(fault), mode)
        assert result.is_accepted
        assert [problem.kind for problem in result.problems] == [kind]


@pytest.mark.parametrize(("fault", "kind"), FAULTS + WARNINGS)
def test_no_problem_is_looked_for_when_validation_is_disabled(
    fault: Callable[[PrismEnvelope], None], kind: ProblemKind
) -> None:
    result = validate_envelope(broken(fault), ValidationMode.DISABLED)
    assert (result.is_accepted, result.problems) == (True, ())


@pytest.mark.parametrize("mode", ValidationMode)
def test_bytes_that_are_no_envelope_are_refused_in_every_mode(mode: ValidationMode) -> None:
    result = validate_envelope(b"junk", mode)
    assert not result.is_accepted
    assert [problem.kind for problem in result.problems] == [ProblemKind.UNREADABLE]


def test_all_problems_are_reported_at_once() -> None:
    envelope = PrismEnvelope(envelope_version=3)
    envelope.metadata.published_at.nanos = -1
    kinds = {problem.kind for problem in validate_envelope(envelope.SerializeToString()).problems}
    assert kinds == {
        ProblemKind.UNSUPPORTED_VERSION,
        ProblemKind.MISSING_MESSAGE_ID,
        ProblemKind.MISSING_TOPIC,
        ProblemKind.INVALID_TIMESTAMP,
    }


@pytest.mark.parametrize(("fault", "kind"), FAULTS + WARNINGS)
def test_a_problem_is_told_in_one_sentence(fault: Callable[[PrismEnvelope], None], kind: ProblemKind) -> None:
    (problem,) = validate_envelope(broken(fault)).problems
    assert problem.message.endswith(".")
    assert ". " not in problem.message


def test_modes_are_named_as_the_configuration_names_them() -> None:
    assert [ValidationMode(name) for name in ("strict", "warn", "disabled")] == list(ValidationMode)
