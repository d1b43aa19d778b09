"""Target: lines of JSON: those of an import, and those that an HTTP server streams to its client."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from postroom.adapters import http_client
from postroom.application.ingest.file_import import (
    RecordMapping,
    TopicTemplate,
    parse_path,
    read_record,
    time_us,
)
from postroom.application.operations import contract, query_contract
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.received_messages import DeliveredMessage
from postroom.application.remote_errors import ProblemBrief
from postroom.domain.errors import InvalidRequest, PostroomError
from tests.fuzz.target import Check

_MAPPING = RecordMapping(
    topic=TopicTemplate("github.{type}.{payload.action}"),
    headers={"principal": parse_path("actor.login"), "size": parse_path("payload.size")},
    key=parse_path("repo.0"),
    time=parse_path("created_at"),
    id=parse_path("id"),
)
_DELIVERY = (
    b'{"msg_id": "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01", "topic": "orders", "shard": 3, "attempt": 1, '
    b'"receipt": "r.AZnSxG8AehCMITtbD2-eAQAAAAIAAAAAAAE", "visible_at": "2026-11-22T12:00:05.000000Z", '
    b'"idem_key": null, "payload_hash": "b3:' + b"5a" * 32 + b'", "hash_chain": "b3:' + b"c4" * 32 + b'", '
    b'"envelope_b64": "CAE="}'
)
_ANSWERS = (
    contract.SendResult,
    contract.SendAnswers,
    contract.Deliveries,
    contract.SettleResults,
    query_contract.ReadDetail,
    ProblemBrief,
    *(
        http_client.answer_of(OPERATIONS[name])
        for name in ("list_dead_letters", "peek_messages", "get_topic_policy")
    ),
)

SEEDS = [
    b'{"specversion": "1.0", "id": "1", "source": "/shop", "type": "orders.created", "data": {"total": 7}, '
    b'"time": "2026-01-31T12:00:00Z", "traceparent": "00-' + b"a" * 32 + b"-" + b"b" * 16 + b'-01"}',
    b'{"specversion": "1.0", "id": "1", "source": "|", "type": "t", "data_base64": "AP8="}',
    (
        b'{"type": "push", "payload": {"action": null, "size": 1.5}, "actor": {"login": "ada"}, '
        b'"created_at": 1700000000, "repo": [7], "id": "x"}'
    ),
    b"CAESBwoFb3JkZXI=",
    _DELIVERY,
    _DELIVERY.replace(b"b3:", b"b3;").replace(b"Z", b""),
    b'{"heartbeat": "2026-11-22T12:00:05.000000Z"}',
    b'{"error": {"status": 503, "code": "E_UNAVAILABLE", "message": "stopping", "retry_after_ms": 1000}}',
    b'{"results": [{"msg_id": "a", "duplicate": true}, {"error": {"code": "E_SCHEMA", "message": "m"}}]}',
    b'{"created_at": 1e400, "type": "a"}',
    b'{"created_at": "0001-01-01T00:00:00+23:59", "type": "a", "id": 1}',
]
BOMBS = [
    b"[" * (1 << 20),
    b'{"a":' * 200_000,
    b'{"specversion": "1.0", "data": ' + b"[" * 200_000,
    b'{"created_at": ' + b"9" * (1 << 20) + b', "type": "a", "id": "b"}',
    b"A" * (1 << 20),
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check."""
    yield check


def check(data: bytes) -> None:
    """Check that a line becomes a message or delivery, or is refused."""
    for mapping in (None, _MAPPING):
        with suppress(InvalidRequest):
            record = read_record(data, 1, mapping)
            assert record == read_record(data, 1, mapping)
    with suppress(InvalidRequest):
        time_us(data.decode("utf-8", "replace"))
    with suppress(PostroomError, msgspec.DecodeError, ValueError):
        for delivery in http_client.read_line(data):
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(delivery), type=type(delivery)) == delivery
            DeliveredMessage(delivery).to_json()
    for kind in _ANSWERS:
        with suppress(msgspec.DecodeError):
            http_client.read_answer(data, kind)
