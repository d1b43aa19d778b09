import pytest

from postroom.application.inbox.dead_letters import read_dead_letter
from postroom.application.ports.source import SourceMessage
from postroom.domain.errors import InvalidRequest


@pytest.mark.parametrize(
    "data",
    [b"{}", b"[" * 100_000, b'{"payload":' + b"[" * 100_000, b'{"a":' * 100_000, b'"\xff"', b'"\\ud800"'],
)
def test_foreign_data_on_the_dead_letter_subject_is_refused(data: bytes) -> None:
    message = SourceMessage("sea.dlq.orders", data, {}, 1, "7", token=None)
    with pytest.raises(InvalidRequest, match=r"Message 7 of sea\.dlq\.orders"):
        read_dead_letter(message)
