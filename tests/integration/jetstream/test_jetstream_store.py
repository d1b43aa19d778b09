"""A store in JetStream: several hosts, verification, backup, projections, and what it refuses."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import nats
import pytest

from postroom import InvalidRequest, NewMessage, connect, open_mailbox
from postroom.adapters.compose.backup import back_up, verify_backup
from postroom.adapters.compose.doctor import store_checks
from postroom.adapters.compose.projections import rebuild_projections
from postroom.adapters.compose.queries import open_read_models, read_mailbox
from postroom.adapters.compose.restore import restore
from postroom.adapters.compose.store import open_store
from postroom.adapters.jetstream import frames
from postroom.adapters.jetstream.client import StoredMessage
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.store import JetStreamStore
from postroom.application.mailbox.codec import compress, decompress
from postroom.domain.errors import BrokenLog
from postroom.domain.search import EventFilter
from tests.support.stores import MAILBOX, live, message
from tests.support.waiting import SECONDS

ORDER = NewMessage(topic="orders", payload=b"1")


@contextmanager
def host(folder: Path, name: str) -> Iterator[None]:
    """Make this process one of another host while the context lasts: it finds no socket of the others."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    (folder / name).mkdir(mode=0o700, exist_ok=True)
    os.environ["XDG_RUNTIME_DIR"] = str(folder / name)
    try:
        yield
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


@pytest.fixture
def hosts() -> Iterator[Path]:
    with TemporaryDirectory(prefix="postroom-") as folder:
        yield Path(folder)


async def test_processes_of_two_hosts_share_a_mailbox(jetstream_store: str, hosts: Path) -> None:
    owning, sharing = open_mailbox(jetstream_store, MAILBOX), connect(jetstream_store, MAILBOX)
    with host(hosts, "a"):
        owner = await owning.__aenter__()
    with host(hosts, "b"):
        mailbox = await sharing.__aenter__()
    try:
        sent = await mailbox.send_message(NewMessage(topic="orders", payload=b"x" * 500_000))
        (received,) = await owner.receive_messages("orders")
        assert received.message_id == sent.message_id
        await received.ack()
        assert (await mailbox.get_message(sent.message_id)).status == "acked"
    finally:
        await sharing.__aexit__(None, None, None)
        await owning.__aexit__(None, None, None)


OWN = """
import asyncio, sys
from postroom import NewMessage, open_mailbox

async def own():
    async with open_mailbox(sys.argv[1], sys.argv[2]) as mailbox:
        await mailbox.send_batch([NewMessage(topic="orders", payload=b"%d" % n) for n in range(3)])
        print("owned", flush=True)
        await asyncio.Event().wait()

asyncio.run(own())
"""


@pytest.fixture
def killed_owner(jetstream_store: str) -> None:
    """A process on another host that owned the mailbox, sent three messages, and was killed."""
    command = [sys.executable, "-c", OWN, jetstream_store, MAILBOX]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "owned\n"
        process.kill()


@pytest.mark.usefixtures("killed_owner")
async def test_another_host_takes_the_mailbox_when_the_owner_is_killed(jetstream_store: str) -> None:
    async with asyncio.timeout(SECONDS), connect(jetstream_store, MAILBOX, timeout_ms=60_000) as mailbox:
        assert len(await mailbox.receive_messages("orders", max_messages=10)) == 3


async def test_a_log_is_verified_and_a_backup_of_it_too(jetstream_store: str, tmp_path: Path) -> None:
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        await live(mailbox, 30)
        position = mailbox.engine.mailbox.position
    with read_mailbox(jetstream_store, MAILBOX) as reader:
        assert reader.verify_log().last == position
    manifest = back_up(jetstream_store, tmp_path / "backup")
    assert [each.position for each in manifest.mailboxes] == [position]
    assert manifest.store == "jetstream"
    assert verify_backup(tmp_path / "backup")[1][0].last == position
    await restore(tmp_path / "backup", str(tmp_path / "store.db"))
    with read_mailbox(str(tmp_path / "store.db"), MAILBOX) as reader:
        assert reader.verify_log().last > position  # a new epoch begins


async def test_an_altered_commit_is_found_though_its_digest_was_made_again(jetstream_store: str) -> None:
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        for number in range(5):
            await mailbox.send_message(message(b"%d" % number))
    settings = parse_store_url(jetstream_store)
    subject, name = f"{settings.stream}.{MAILBOX}", settings.stream

    async def alter() -> None:
        client = await nats.connect(settings.nats.url)
        stream = client.jetstream()
        messages = [await stream.get_msg(name, sequence) for sequence in range(1, 7)]
        await stream.delete_stream(name)
        open_store(jetstream_store).event_log(MAILBOX).close()
        for sequence, each in enumerate(messages, 1):
            stored = StoredMessage(subject, sequence, each.data or b"")
            await stream.publish(subject, altered(stored) if sequence == 4 else stored.data)
        await client.close()

    await asyncio.to_thread(lambda: asyncio.run(alter()))
    with (
        read_mailbox(jetstream_store, MAILBOX) as reader,
        pytest.raises(BrokenLog, match="does not match its hash"),
    ):
        reader.verify_log()


def altered(stored: StoredMessage) -> bytes:
    """Return a message with another topic in its events, as somebody would make it who knows the format."""
    frame = frames.decode_frame(stored)
    events, *others = msgspec.msgpack.decode(frame.body)
    events = compress(decompress(events, frame.first).replace(b"orders", b"parcel"))
    body = msgspec.msgpack.encode([events, *others])
    encoded = msgspec.msgpack.encode(msgspec.structs.replace(frame, body=body))
    return frames.seal(stored.subject, encoded)


async def test_projections_are_built_elsewhere_and_searches_are_refused_in_words(
    jetstream_store: str, tmp_path: Path
) -> None:
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        await live(mailbox, 30)
        with pytest.raises(InvalidRequest, match="has no read models, as JetStream can't be searched"):
            await mailbox.search_messages(EventFilter())
    report = await asyncio.to_thread(
        rebuild_projections, jetstream_store, into=f"parquet:{tmp_path / 'models'}", engine="local"
    )
    assert report.rows["mailbox"] == 30
    for call in (
        lambda: open_read_models(jetstream_store),
        lambda: rebuild_projections(jetstream_store, engine="local"),
    ):
        with pytest.raises(InvalidRequest, match="has no read models"):
            await asyncio.to_thread(call)


async def test_the_log_reader_tells_extents_and_bounds(jetstream_store: str) -> None:
    reader = JetStreamStore(jetstream_store).log_reader()
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        await live(mailbox, 9)
        position = mailbox.engine.mailbox.position
    assert reader.heads() == {MAILBOX: position}
    assert reader.bounds()[MAILBOX].sealed == position
    (extent,) = reader.extents()
    assert (extent.id, extent.first, extent.last) == (1, 1, position)
    assert [each.last for each in reader.extents({MAILBOX: 2})] == [2]


async def test_doctor_tells_how_a_store_is_replicated(jetstream_store: str) -> None:
    async with open_mailbox(jetstream_store, MAILBOX) as mailbox:
        await mailbox.send_message(ORDER)
    findings = await asyncio.to_thread(
        lambda: [finding for check in store_checks(jetstream_store, "full", 5) for finding in check.run()]
    )
    assert [(each.check, each.status) for each in findings] == [
        ("streams", "ok"),
        ("durability", "ok"),
        ("logs", "ok"),
    ]


def test_an_address_that_is_malformed_is_refused() -> None:
    for url, reason in (
        ("nats://host", "expected nats://HOST:PORT"),
        ("nats://host/a.b", "not a name of a stream"),
        ("nats:///NAME", "expected nats://HOST:PORT"),
        ("nats://host:x/NAME", "expected nats://HOST:PORT"),
        ("nats://host/NAME?colour=red", "unknown option colour"),
        ("nats://host/NAME?replicas=many", "must be a number"),
        ("nats://host/NAME?sync=never", "can only be always"),
        ("nats://host/NAME?monitoring=host", "address of a NATS server's monitoring"),
    ):
        with pytest.raises(InvalidRequest, match=reason):
            open_store(url)


def test_a_password_is_in_no_name_of_a_store() -> None:
    store: Any = open_store("nats://me:secret@b:1,a/NAME?ca=/etc/ca.pem")
    assert store.where == "nats://b:1,a:4222/NAME"
    assert store.identity == "nats://a:4222,b:1/NAME"
