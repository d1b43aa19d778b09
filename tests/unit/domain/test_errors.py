"""The error taxonomy (svc-mailbox C-10)."""

import pytest

from postroom.domain import errors
from postroom.domain.errors import (
    Forbidden,
    FrameTooLarge,
    IdempotencyConflict,
    IntegrityFailure,
    InvalidRequest,
    LeaseHeld,
    LeaseLost,
    PostroomError,
    Saturated,
    Unauthenticated,
    Unavailable,
    WrongOwner,
)


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest, 400, "E_SCHEMA"),
        (Unauthenticated, 401, "E_CAP_AUTH"),
        (Forbidden, 403, "E_CAP_SCOPE"),
        (IdempotencyConflict, 409, "E_DUPLICATE"),
        (LeaseHeld, 409, "E_LEASE_HELD"),
        (LeaseLost, 409, "E_LEASE_LOST"),
        (FrameTooLarge, 413, "E_FRAME_TOO_LARGE"),
        (WrongOwner, 421, "E_WRONG_OWNER"),
        (IntegrityFailure, 422, "E_INTEGRITY"),
        (Saturated, 429, "E_SATURATED"),
        (Unavailable, 503, "E_UNAVAILABLE"),
    ],
)
def test_codes_are_those_of_the_specification(error: type[PostroomError], status: int, code: str) -> None:
    assert (error.status, error.code) == (status, code)


def test_the_tree_in_the_docstring_matches_the_classes() -> None:
    def drawn(error: type[PostroomError]) -> list[str]:
        lines = [error.__name__]
        for child in error.__subclasses__():
            if child.__module__ == errors.__name__:
                lines += drawn(child)
        return lines

    assert errors.__doc__ is not None
    tree = errors.__doc__.split("\n\n")[1]
    names = [line.strip("│├└─ ").split()[0] for line in tree.splitlines()]
    assert sorted(names) == sorted(drawn(PostroomError))
    for line in tree.splitlines():
        words = line.strip("│├└─ ").split()
        found: type[PostroomError] = getattr(errors, words[0])
        if len(words) > 1 and words[1].isdigit():
            assert (str(found.status), found.code) == (words[1], words[2].rstrip(","))


def test_every_saturated_error_has_a_retry_time() -> None:
    assert Saturated("full", 250).retry_after_ms == 250
    assert Unavailable("closed").retry_after_ms == 1_000
