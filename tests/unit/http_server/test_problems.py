"""Problem documents of refused requests."""

import msgspec
import pytest

from postroom.adapters.http_server.problems import problem
from postroom.application.remote_errors import ProblemBrief
from postroom.domain.errors import Forbidden, NotFound, PostroomError, Unauthenticated


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unauthenticated("It has expired.", "expired"), {"reason": "expired"}),
        (Forbidden("It does not cover the topic.", "topic"), {"reason": "topic"}),
        (Unauthenticated("There is none."), {}),
        (NotFound("There is no such message."), {}),
    ],
    ids=repr,
)
def test_a_refusal_by_access_control_has_its_reason(error: PostroomError, reason: dict[str, str]) -> None:
    for document in (problem(error, "corr-1"), ProblemBrief.of(error)):
        fields = msgspec.to_builtins(document)
        assert {name: fields[name] for name in ("reason",) if name in fields} == reason
