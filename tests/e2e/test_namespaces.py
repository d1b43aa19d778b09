"""The namespace file of RFC-037 ingests from NATS and from Redis, with addresses and paths of the test."""

import asyncio
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import nats
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_tools import protoc
from redis import Redis

from postroom.adapters.compose.queries import read_mailbox
from postroom.domain.message import MessageSent
from tests.e2e.conftest import Postroom
from tests.support.envelopes import build_envelope

SEED = Path(__file__).parents[1] / "unit/config/rfc-037.yaml"
MAILBOX = "$admin@mailbox-admin"
PROTO = """\
syntax = "proto3";
package acme.admin.v1;
message UserCreatedEvent { string user_id = 1; }
message UserUpdatedEvent { string user_id = 1; }
message RoleAssignedEvent { string user_id = 1; string role = 2; }
message PolicyChangedEvent { string policy = 1; }
"""
MESSAGES = {
    "admin.users.created": ("UserCreatedEvent", {"user_id": "u-1"}),
    "admin.users.updated": ("UserUpdatedEvent", {"user_id": "u-1"}),
    "admin.roles.assigned": ("RoleAssignedEvent", {"user_id": "u-1", "role": "editor"}),
    "admin.policies.changed": ("PolicyChangedEvent", {"policy": "retention"}),
}


@pytest.fixture
def event(postroom: Postroom) -> Callable[[str, str], bytes]:
    """Make envelopes, by their topic and message id, as services do that share the descriptors."""
    (postroom.folder / "admin.proto").write_text(PROTO)
    target = postroom.folder / "admin.binpb"
    arguments = [f"-I{postroom.folder}", f"-I{files('grpc_tools') / '_proto'}", "--include_imports"]
    assert protoc.main(["protoc", *arguments, f"--descriptor_set_out={target}", "admin.proto"]) == 0
    pool = DescriptorPool()
    for file in FileDescriptorSet.FromString(target.read_bytes()).file:
        pool.Add(file)

    def make(topic: str, message_id: str) -> bytes:
        name, fields = MESSAGES[topic]
        message: Any = GetMessageClass(pool.FindMessageTypeByName(f"acme.admin.v1.{name}"))(**fields)
        return envelope(topic, message_id, message.SerializeToString())

    return make


def envelope(topic: str, message_id: str, payload: bytes) -> bytes:
    return build_envelope(
        message_id=message_id,
        topic=topic,
        namespace="$admin",
        published_at_us=1_700_000_000_000_000,
        payload=payload,
        attrs={},
        principal="user-7",
    )


def write_namespace(postroom: Postroom, *replacements: tuple[str, str]) -> str:
    """Write the RFC's file with the paths of this test, and return its path."""
    text = SEED.read_text("utf-8")
    for old, new in (
        ("/Users/jrepp/.prism/mailbox-admin.db", "postroom.db"),
        ("        schemas:\n", "        file: admin.binpb\n        schemas:\n"),
        *replacements,
    ):
        assert old in text
        text = text.replace(old, new)
    file = postroom.folder / "namespaces.yaml"
    file.write_text(text, "utf-8")
    return str(file)


def redis_namespace(postroom: Postroom, url: str, stream: str, *replacements: tuple[str, str]) -> str:
    return write_namespace(
        postroom,
        ("backend: nats", "backend: redis"),
        ("url: nats://localhost:4222", f"url: {url}"),
        ("subject: admin.events.>", f"stream: {stream}"),
        *replacements,
    )


def stored(postroom: Postroom, mailbox: str = MAILBOX) -> list[str]:
    """Return the ids of the messages that the mailbox holds, in the order of its log."""
    with read_mailbox(str(postroom.store), mailbox) as reader:
        records = [record for record in reader.log.read() if record.type.startswith(MessageSent.__name__)]
    return [record.message_id or "" for record in records]


def test_the_rfc_s_file_ingests_from_nats(
    postroom: Postroom, nats_url: str, event: Callable[[str, str], bytes]
) -> None:
    async def publish() -> None:
        client = await nats.connect(nats_url)
        stream = client.jetstream()
        await stream.add_stream(name="ADMIN", subjects=["admin.events.>"])
        for number, topic in enumerate(MESSAGES):
            await stream.publish("admin.events.one", event(topic, f"m-{number}"))
        await stream.publish("admin.events.two", envelope("admin.users.created", "bad", b"\xff"))
        await stream.publish("admin.events.two", b"no envelope")
        await stream.publish("admin.events.two", event("admin.users.created", "m-0"))
        await client.close()

    asyncio.run(publish())
    config = write_namespace(postroom, ("nats://localhost:4222", nats_url))
    done = postroom.ok("ingest", "--config", config, "--once", "--json")
    assert stored(postroom) == ["m-0", "m-1", "m-2", "m-3"]
    counts = done.lines[-1]
    assert (counts["received"], counts["stored"], counts["duplicates"], counts["skipped"]) == (7, 4, 1, 2)
    assert "The payload on admin.users.created can't be decoded as acme.admin.v1.UserCreatedEvent" in done.err


def test_the_same_file_ingests_from_redis(
    postroom: Postroom, redis_url: str, event: Callable[[str, str], bytes]
) -> None:
    stream = f"admin-{postroom.folder.name}"
    with Redis.from_url(redis_url) as client:
        for number, topic in enumerate(MESSAGES):
            client.xadd(stream, {"data": event(topic, f"m-{number}")})
        client.xadd(stream, {"data": envelope("admin.users.created", "bad", b"\xff")})
        config = redis_namespace(
            postroom, redis_url, stream, ("        validation: strict", "        validation: warn")
        )
        postroom.ok("ingest", "--config", config, "--once")
        client.xadd(stream, {"anything": event("admin.users.created", "m-4")})
        postroom.ok("ingest", "--config", config, "--once")
        assert stored(postroom) == ["m-0", "m-1", "m-2", "m-3", "bad", "m-4"]
        assert client.xpending(stream, "mailbox-admin")["pending"] == 0


def test_a_killed_ingester_goes_on_and_stores_each_message_of_redis_once(
    postroom: Postroom, redis_url: str, event: Callable[[str, str], bytes]
) -> None:
    stream, count = f"admin-{postroom.folder.name}", 3_000
    config = redis_namespace(
        postroom,
        redis_url,
        stream,
        ("durable: true", "ack_wait_seconds: 1"),
        ("batch_size: 100", "batch_size: 7"),
    )
    ids = [f"m-{number}" for number in range(count)]
    with Redis.from_url(redis_url) as client:
        with client.pipeline() as pipeline:
            for id_ in ids:
                pipeline.xadd(stream, {"data": event("admin.users.created", id_)})
            pipeline.execute()
        killed = postroom.start("ingest", "--config", config)
        postroom.wait_for_owner(killed, MAILBOX)
        while len(stored(postroom)) < 100:
            assert killed.poll() is None, killed.communicate()
        killed.kill()
        killed.communicate()
        assert 100 <= len(stored(postroom)) < count
        while sorted(stored(postroom)) != sorted(ids):
            postroom.ok("ingest", "--config", config, "--once")
        assert client.xpending(stream, "mailbox-admin")["pending"] == 0


def test_a_file_may_say_postgresql(
    postroom: Postroom, redis_url: str, postgres_store: str, event: Callable[[str, str], bytes]
) -> None:
    stream = f"admin-{postroom.folder.name}"
    with Redis.from_url(redis_url) as client:
        client.xadd(stream, {"data": event("admin.users.created", "m-0")})
    config = redis_namespace(
        postroom,
        redis_url,
        stream,
        ("backend: sqlite", "backend: postgres"),
        ("database_path: postroom.db", f"url: {postgres_store}"),
    )
    postroom.ok("ingest", "--config", config, "--once")
    with read_mailbox(postgres_store, MAILBOX) as reader:
        assert reader.get_message("m-0").topic == "admin.users.created"


def test_what_is_wrong_with_a_file_is_said_before_anything_begins(postroom: Postroom) -> None:
    config = write_namespace(postroom, ("batch_size", "batchsize"))
    refused = postroom("ingest", "--config", config, "--once")
    assert refused.code != 0
    assert f"{config}, line 71: namespaces[0].behavior has no key 'batchsize'" in refused.err
    assert not postroom.store.exists()


def test_payloads_are_not_said_to_be_valid_without_a_schema(postroom: Postroom, redis_url: str) -> None:
    config = redis_namespace(postroom, redis_url, "orders", ("        file: admin.binpb\n", ""))
    refused = postroom("ingest", "--config", config, "--once")
    assert refused.code != 0
    assert "Payloads of topic admin.users.created can't be validated without a schema" in refused.err
