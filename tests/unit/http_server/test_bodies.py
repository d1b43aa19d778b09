"""Whatever bytes a body or a query string has, it is decoded or refused with one sentence."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.adapters.http_server.api import make_routes
from postroom.adapters.http_server.handlers import MessageHandlers
from postroom.adapters.http_server.queries import QueryHandlers, StateHandlers
from postroom.adapters.http_server.requests import decode, parse_query
from postroom.adapters.sockets.address import is_loopback_name
from postroom.application.operations import contract, query_contract
from postroom.domain.errors import InvalidRequest

# Routes know the types of bodies and parameters; their handlers are not called.
ROUTES = make_routes(MessageHandlers, QueryHandlers, StateHandlers)  # type: ignore[arg-type]
KINDS: list[Any] = [each.body for each in ROUTES if each.body is not None]
QUERIES: list[Any] = [each.query for each in ROUTES if each.query is not None]

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
names = st.text(max_size=5) | st.sampled_from(
    ["topic", "payload_b64", "attrs", "receipts", "limit", "wait_ms"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=20,
)
documents = values.map(lambda value: json.dumps(value, allow_nan=True).encode())


def outcome(body: bytes, kind: Any) -> Any:
    """Return the value of a body, or None if it was refused with one sentence."""
    try:
        return decode(body, msgspec.json.Decoder(kind))
    except InvalidRequest as error:
        text = str(error)
        assert text.endswith(".")
        assert "\n" not in text
        assert len(text) < 500
        return None


@given(st.binary(max_size=200) | documents, st.sampled_from(KINDS))
def test_any_body_is_decoded_or_refused(body: bytes, kind: Any) -> None:
    outcome(body, kind)


@given(documents, st.data())
def test_a_document_that_is_cut_or_damaged_is_decoded_or_refused(
    document: bytes, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(document)))
    damage = data.draw(st.binary(max_size=4))
    outcome(document[:start] + damage + document[start + 1 :], contract.SendBody)


@given(
    st.fixed_dictionaries(
        {"topic": st.text(min_size=1, max_size=20)},
        optional={"attrs": st.dictionaries(st.text(min_size=1, max_size=5), st.text(max_size=5))},
    )
)
def test_what_is_decoded_is_what_was_sent(document: dict[str, Any]) -> None:
    body = json.dumps(document | {"payload_b64": "AP8="}).encode()
    sent = outcome(body, contract.SendBody)
    texts = [document["topic"], *document.get("attrs", {}), *document.get("attrs", {}).values()]
    assert (sent is None) == any("\0" in text for text in texts)
    if sent is not None:
        assert (sent.topic, sent.attrs, sent.payload_b64) == (
            document["topic"],
            document.get("attrs", {}),
            b"\0\xff",
        )


@given(st.lists(st.tuples(names, scalars), min_size=1, max_size=5), st.data())
def test_a_name_that_occurs_twice_is_refused(pairs: list[tuple[str, Any]], data: st.DataObject) -> None:
    twice = data.draw(st.sampled_from(pairs))
    members = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in [*pairs, twice])
    with pytest.raises(InvalidRequest, match=r"twice|invalid"):
        decode(f"{{{members}}}".encode(), msgspec.json.Decoder())


@given(st.sampled_from([b"[", b'{"a":', b'[{"a":']), st.integers(1, 20_000))
def test_deep_nesting_is_refused(opening: bytes, depth: int) -> None:
    assert outcome(opening * depth, contract.SendBody) is None
    assert (
        outcome(b'{"topic": "t", "payload_b64": "", "attrs": ' + opening * depth, contract.SendBody) is None
    )


@given(
    st.text(alphabet=st.characters(codec="ascii"), max_size=60)
    | st.lists(st.tuples(names, st.text(max_size=5))).map(
        lambda pairs: "&".join(f"{a}={b}" for a, b in pairs)
    ),
    st.sampled_from(QUERIES),
)
def test_any_query_string_is_parsed_or_refused(query: str, kind: Any) -> None:
    refusal = None
    try:
        parse_query(query.encode("utf-8", "replace"), kind)
    except InvalidRequest as error:
        refusal = str(error)
    assert refusal is None or refusal.endswith(".")


def test_lists_and_mappings_are_repeated_parameters() -> None:
    query = parse_query(
        b"topics=a&topics=b%26c&headers[x]=1&headers[y%20]=2&limit=5", query_contract.MessagesQuery
    )
    assert (query.topics, query.headers, query.limit) == (["a", "b&c"], {"x": "1", "y ": "2"}, 5)


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "127.0.0.1", "127.1.2.3:9", "[::1]:80"])
def test_loopback_names_are_this_machine(host: str) -> None:
    assert is_loopback_name(host)


@pytest.mark.parametrize(
    "host",
    [
        *["", "localhost.example.com", "notlocalhost", "localhost@example.com", "localhost."],
        *["127.0.0.1.example.com", "example.com:127", "128.0.0.1", "0.0.0.0", "10.0.0.1:80", "127.1"],
        *["2130706433", "0x7f000001"],
        *["[::2]", "[::ffff:10.0.0.1]", "[::1", "[fe80::1]:80"],
    ],
)
def test_no_other_name_is_this_machine(host: str) -> None:
    assert not is_loopback_name(host)


@given(st.text(max_size=30))
def test_any_host_is_answered(host: str) -> None:
    assert isinstance(is_loopback_name(host), bool)


@given(
    st.sampled_from(["topic", "payload_b64", "idem_key", "content_type", "attrs"]),
    st.permutations(["topic", "payload_b64", "idem_key", "content_type"]),
    st.text(alphabet='ab:",{}\\\u0000', max_size=4),
    st.sampled_from(["", " ", "\n"]),
)
def test_a_name_that_occurs_twice_is_refused_whatever_is_around_it(
    twice: str, names: list[str], text: str, space: str
) -> None:
    fields = dict.fromkeys(names, json.dumps(text)) | {"payload_b64": '""', "attrs": '{"a": "1"}'}
    once = [f'"{name}"{space}:{space}{value}' for name, value in fields.items()]
    assert (
        outcome(f"{{{','.join([*once, once[list(fields).index(twice)]])}}}".encode(), contract.SendBody)
        is None
    )
    sent = outcome(f"{{{','.join(once)}}}".encode(), contract.SendBody)
    assert (sent is None) == (not text or "\0" in text)
