"""Ids that are made from names."""

from uuid import UUID, uuid5

from hypothesis import given
from hypothesis import strategies as st

from postroom.domain.names import mailbox_stream, message_stream

NAMESPACE = UUID("6ad9bd0e-54c4-5d0b-9a39-0d9bb4ce1c4e")


@given(name=st.text(min_size=1, max_size=200).filter(lambda text: "-" not in text))
def test_a_stream_is_the_uuid_of_version_5_of_what_it_stands_for(name: str) -> None:
    assert mailbox_stream(name) == uuid5(NAMESPACE, name).bytes
    assert message_stream("acme@one", name) == uuid5(NAMESPACE, f"acme@one/{name}").bytes
