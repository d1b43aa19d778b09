import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.errors import InvalidRequest
from postroom.domain.subject import EventSubject

TOKENS = st.from_regex(r"[\w-]{1,20}", fullmatch=True)


@given(TOKENS, TOKENS, st.integers(1, 999_999_999))
def test_a_subject_round_trips(context: str, name: str, version: int) -> None:
    subject = EventSubject(context, name, version)
    assert EventSubject.parse(subject.value) == subject
    assert subject.value.split(".") == [context, "event", name, f"v{version}"]


@pytest.mark.parametrize(
    "token", ["", " ", "a b", "a.b", "*", ">", "a*", "$JS", "a\n", "\n", "a\x00", "a\u2028b", "a" * 129]
)
def test_a_token_can_not_contain_separators_or_wildcards(token: str) -> None:
    with pytest.raises(InvalidRequest, match="can't be part of a subject"):
        EventSubject(token, "order_placed", 1)
    with pytest.raises(InvalidRequest, match="can't be part of a subject"):
        EventSubject("sea", token, 1)


@pytest.mark.parametrize("version", [0, -1, 10**9])
def test_versions_are_counted_from_one(version: int) -> None:
    with pytest.raises(InvalidRequest, match="must be at least 1"):
        EventSubject("sea", "order_placed", version)


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "sea",
        "sea.event.x",
        "sea.event.x.1",
        "sea.event.x.v0",
        "sea.event.x.v01",
        "sea.dlq.x.v1",
        "sea.event.x.y.v1",
    ],
)
def test_a_subject_of_another_form_is_refused(subject: str) -> None:
    with pytest.raises(InvalidRequest, match="is not of the form"):
        EventSubject.parse(subject)
