"""Messages come out of the socket's bytes the same, wherever reads happen to cut them."""

import asyncio
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.client import Client
from nats.errors import ProtocolError

from postroom.adapters.nats.client import FastPathParser

OURS, FOREIGN = 7, 77
Message = tuple[bytes, bytes | None, bytes, bytes]

words = st.from_regex(rb"[a-zA-Z0-9$_.]{1,20}", fullmatch=True)
headers = st.just(b"") | st.binary(max_size=40).map(lambda raw: b"NATS/1.0\r\nname: " + raw + b"\r\n\r\n")
messages = st.tuples(words, st.none() | words, headers, st.binary(max_size=200))


def on_the_wire(message: Message, subscription: int) -> bytes:
    subject, reply, headers, data = message
    parts = [b"HMSG" if headers else b"MSG", subject, b"%d" % subscription]
    parts += [reply] if reply is not None else []
    parts += [b"%d" % len(headers)] if headers else []
    line = b" ".join([*parts, b"%d" % (len(headers) + len(data))])
    return line + b"\r\n" + headers + data + b"\r\n"


def parse(reads: list[bytes]) -> list[Message]:
    async def run() -> list[Message]:
        found: list[Message] = []
        parser = FastPathParser(Client())
        parser.add(OURS, lambda *message: found.append(message))
        for read in reads:
            await parser.parse(read)
        return found

    return asyncio.run(run())


def cut(stream: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(stream) + 1) for place in places), len(stream)]
    return [stream[start:end] for start, end in pairwise(at)]


@given(st.lists(st.tuples(messages, st.booleans()), max_size=8), st.lists(st.integers(0), max_size=12))
def test_our_messages_come_whole_and_in_order_and_no_others(
    sent: list[tuple[Message, bool]], places: list[int]
) -> None:
    stream = b"".join(on_the_wire(message, OURS if is_ours else FOREIGN) for message, is_ours in sent)
    assert parse(cut(stream, places)) == [message for message, is_ours in sent if is_ours]


def test_each_subscription_gets_its_own_messages_and_is_woken_once_a_read() -> None:
    async def run() -> list[str]:
        calls: list[str] = []

        def deliver(id_: int, subject: bytes, reply: bytes | None, headers: bytes, data: bytes) -> None:
            calls.append(f"{id_} {data.decode()}")

        parser = FastPathParser(Client())
        for id_ in (1, 12):
            parser.add(id_, partial(deliver, id_), partial(calls.append, f"wake {id_}"))
        reads = [[(1, b"a"), (12, b"b"), (1, b"c"), (2, b"d")], [(12, b"e")]]
        for messages in reads:
            stream = [on_the_wire((b"acme", None, b"", data), id_) for id_, data in messages]
            await parser.parse(b"".join(stream))
        return calls

    calls = asyncio.run(run())
    assert calls[:3] == ["1 a", "12 b", "1 c"]
    assert sorted(calls[3:5]) == ["wake 1", "wake 12"]
    assert calls[5:] == ["12 e", "wake 12"]


def test_every_single_byte_may_be_a_read_of_its_own() -> None:
    message = (b"acme.orders", b"$JS.ACK.S.C.1.2.3.4.5", b"NATS/1.0\r\na: b\r\n\r\n", b"\r\nMSG x 7 0\r\n")
    stream = on_the_wire(message, OURS) * 2
    assert parse([stream[at : at + 1] for at in range(len(stream))]) == [message, message]


@pytest.mark.parametrize("line", [b"MSG a 7 many\r\n", b"MSG 5\r\n", b"HMSG\r\n", b"\r\n", b"NONSENSE\r\n"])
def test_what_is_no_protocol_is_an_error_that_ends_the_connection(line: bytes) -> None:
    with pytest.raises(ProtocolError):
        parse([line])
