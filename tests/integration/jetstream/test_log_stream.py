"""The log of a mailbox in a stream: lost answers, incomplete appends, foreign and missing messages."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import nats
import pytest
from nats.js.api import StreamConfig
from nats.js.errors import APIError

from postroom.adapters.jetstream import durability, log_index
from postroom.adapters.jetstream.event_log import JetStreamEventLog
from postroom.adapters.jetstream.frames import encode_append
from postroom.adapters.jetstream.settings import parse_store_url
from postroom.adapters.jetstream.store import JetStreamStore, check_streams
from postroom.domain.commit import GENESIS, verify_chain
from postroom.domain.errors import BrokenLog, Fenced, InvalidRequest
from tests.conformance.log_store import ONE
from tests.conformance.records import after, append, append_each, received, sent, stream
from tests.support.logs import capture_logs
from tests.support.servers.nats import NatsServer
from tests.support.servers.postgres_proxy import Proxy
from tests.support.servers.process import LOOPBACK, free_port
from tests.support.waiting import SECONDS, wait_until

NOISE = Random(1).randbytes(5_000)


@pytest.fixture
def store(jetstream_store: str) -> JetStreamStore:
    return JetStreamStore(jetstream_store)


@pytest.fixture
def log(store: JetStreamStore) -> Iterator[JetStreamEventLog]:
    with closing(store.event_log(ONE)) as log:
        yield log


def with_client(url: str, work: Callable[[Any], Awaitable[Any]]) -> Any:
    """Return what a client of the server of a store's address does."""

    async def run() -> Any:
        client = await nats.connect(parse_store_url(url).nats.url.split(","))
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(run())


def name_of(url: str) -> str:
    return parse_store_url(url).stream


def publish(url: str, subject: str, *payloads: bytes, expected: int | None = None) -> None:
    headers = None if expected is None else {"Nats-Expected-Last-Subject-Sequence": str(expected)}

    async def work(client: Any) -> None:
        for payload in payloads:
            await client.jetstream().publish(subject, payload, headers=headers)

    with_client(url, work)


def count_messages(url: str) -> int:
    async def work(client: Any) -> int:
        info = await client.jetstream().stream_info(name_of(url))
        return int(info.state.messages)

    return int(with_client(url, work))


# -- unknown outcomes ---


def test_an_append_whose_answer_was_lost_with_the_connection_is_stored_once(jetstream_store: str) -> None:
    server, _, name = jetstream_store.rpartition("/")
    with (
        Proxy(server) as proxy,
        ThreadPoolExecutor(1) as thread,
        closing(JetStreamStore(f"{proxy.url}/{name}").event_log(ONE)) as log,
    ):
        append(log, [sent(1)])
        proxy.hold_answers()
        commits = after_head(log, jetstream_store, [sent(2)])
        appending = thread.submit(log.append, commits)
        wait_until(lambda: count_messages(jetstream_store) == 2)
        proxy.cut()
        appending.result(SECONDS)
        append(log, [sent(3)])
        assert [record.stream for record in log.read()] == [stream(1), stream(2), stream(3)]
    assert count_messages(jetstream_store) == 3


def test_an_append_that_never_reached_the_server_is_repeated(jetstream_store: str) -> None:
    server, _, name = jetstream_store.rpartition("/")
    with (
        Proxy(server) as proxy,
        ThreadPoolExecutor(1) as thread,
        closing(JetStreamStore(f"{proxy.url}/{name}").event_log(ONE)) as log,
    ):
        append(log, [sent(1)])
        commits = after_head(log, jetstream_store, [sent(2)])
        proxy.hold_requests()
        appending = thread.submit(log.append, commits)
        proxy.cut()
        appending.result(SECONDS)
    assert count_messages(jetstream_store) == 2


def after_head(log: JetStreamEventLog, url: str, events: list[Any]) -> Any:
    """Return the commits that append events, read over a connection that works."""
    with closing(JetStreamStore(url).existing_log(log.mailbox)) as reader:
        return after(reader, events)


# -- appends that were not completed ---


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Split appends into small parts, in a stream without batches."""
    monkeypatch.setattr(
        "postroom.adapters.jetstream.client.StreamClient.max_bytes", property(lambda _: 1_000)
    )
    monkeypatch.setattr("postroom.adapters.jetstream.store_streams.ATOMIC_API_LEVEL", 99)


@pytest.mark.usefixtures("parts")
def test_parts_of_an_append_whose_owner_was_killed_are_passed_over(
    store: JetStreamStore, jetstream_store: str
) -> None:
    with closing(store.event_log(ONE)) as log, closing(store.existing_log(ONE)) as reader:
        subject = f"{name_of(jetstream_store)}.{ONE}"
        append(log, [sent(1)])
        large = after(log, [sent(2, envelope=NOISE)], epoch=1)
        messages, _ = encode_append(subject, large, 1, 0, 1_000)
        assert len(messages) > 3
        publish(jetstream_store, subject, *messages[:2])
        head = reader.head()
        assert head is not None
        assert head.position == 1
        assert len(list(reader.read())) == 1
        records = append(log, [sent(3)], epoch=2)
        with pytest.raises(APIError, match="wrong last sequence"):  # the former owner goes on
            publish(jetstream_store, subject, messages[2], expected=3)
        assert [record.position for record in reader.read()] == [1, 2]
        assert reader.read_stream(stream(3)) == records
        append(log, [sent(4, envelope=NOISE)], epoch=2)
        assert [record.stream for record in reader.read()] == [stream(1), stream(3), stream(4)]
        assert verify_chain(reader.commits(), GENESIS, 1)[0] == 3


@pytest.mark.usefixtures("parts")
def test_an_owner_is_fenced_by_the_first_part_of_a_newer_owners_append(
    store: JetStreamStore, jetstream_store: str
) -> None:
    with closing(store.event_log(ONE)) as old:
        append(old, [sent(1)], epoch=1)
        stale = after(old, [sent(2)], epoch=1)
        newer = after(old, [sent(3, envelope=NOISE)], epoch=2)
        subject = f"{name_of(jetstream_store)}.{ONE}"
        messages, _ = encode_append(subject, newer, 1, 0, 1_000)
        publish(jetstream_store, subject, messages[0])
        with pytest.raises(Fenced):
            old.append(stale)


# -- messages of others, and missing ones ---


def test_a_message_of_another_program_is_named(log: JetStreamEventLog, jetstream_store: str) -> None:
    append(log, [sent(1)])
    publish(jetstream_store, f"{name_of(jetstream_store)}.{ONE}", b"hello")
    for read in (log.head, lambda: list(log.commits())):
        with pytest.raises(BrokenLog, match=r"Message 2 of subject .* published by another program"):
            read()


def test_a_mailbox_is_usable_again_when_a_message_of_another_program_is_deleted(
    log: JetStreamEventLog, jetstream_store: str
) -> None:
    append(log, [sent(1)])
    publish(jetstream_store, f"{name_of(jetstream_store)}.{ONE}", b"hello")

    async def delete(client: Any) -> None:
        await client.jetstream().delete_msg(name_of(jetstream_store), 2)

    with_client(jetstream_store, delete)
    append(log, [sent(2)])
    assert [record.stream for record in log.read()] == [stream(1), stream(2)]


def test_copies_of_earlier_messages_are_named(log: JetStreamEventLog, jetstream_store: str) -> None:
    for number in (1, 2):
        append(log, [sent(number)])

    async def copy(client: Any) -> None:
        jetstream = client.jetstream()
        for sequence in (1, 2):
            message = await jetstream.get_msg(name_of(jetstream_store), seq=sequence)
            await jetstream.publish(message.subject, message.data)

    with_client(jetstream_store, copy)
    with pytest.raises(BrokenLog, match=r"Message 3 of subject .* holds positions from 1 on"):
        list(log.commits())


def test_messages_that_are_missing_are_named(log: JetStreamEventLog, jetstream_store: str) -> None:
    append(log, [sent(1)])
    append(log, [sent(2)])
    append(log, [sent(3)])

    async def purge(client: Any) -> None:
        await client.jetstream().purge_stream(name_of(jetstream_store), seq=2)

    with_client(jetstream_store, purge)
    with pytest.raises(BrokenLog, match="The log jumps from position 0 to 2: messages of subject"):
        list(log.commits())


def test_messages_that_do_not_arrive_are_asked_for_again(
    log: JetStreamEventLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [append(log, [sent(n), received(n)])[0] for n in range(1, 21)]
    whole = log._messages._log.read

    async def lossy(*arguments: Any) -> Any:
        page = await whole(*arguments)
        return [each for each in page if each.sequence % 3] or page

    monkeypatch.setattr(log._messages._log, "read", lossy)
    assert [record.stream for record in log.read()][::2] == [record.stream for record in records]


# -- the index ---


def test_runs_of_the_index_that_are_missing_are_made_again(
    store: JetStreamStore, jetstream_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "RUN_ENTRIES", 5)
    with closing(store.event_log(ONE)) as log:
        for number in range(1, 31):
            append(log, [sent(number)])

        async def purge(client: Any) -> None:
            state = f"{name_of(jetstream_store)}_STATE"
            await client.jetstream().purge_stream(state, subject=f"{state}.index.{ONE}.10.*")

        with_client(jetstream_store, purge)
        assert log.existing_streams([stream(8), stream(31)]) == {stream(8)}
    with closing(store.event_log(ONE)) as log, closing(store.existing_log(ONE)) as reader:
        for each in (log, reader):
            assert each.existing_streams([stream(1), stream(8), stream(30), stream(31)]) == {
                stream(1),
                stream(8),
                stream(30),
            }


def test_a_reader_finds_messages_in_runs_that_the_owner_saved(
    store: JetStreamStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_index, "RUN_ENTRIES", 7)
    with closing(store.event_log(ONE)) as log, closing(store.existing_log(ONE)) as reader:
        append_each(log, [sent(n) for n in range(1, 21)])
        assert reader.existing_streams([stream(n) for n in range(30)]) == {stream(n) for n in range(1, 21)}
        append_each(log, [sent(n) for n in range(21, 41)])
        assert reader.existing_streams([stream(n) for n in range(50)]) == {stream(n) for n in range(1, 41)}


# -- settings ---


def test_a_stream_that_could_lose_commits_is_refused(store: JetStreamStore, jetstream_store: str) -> None:
    name = name_of(jetstream_store)

    async def create(client: Any) -> None:
        await client.jetstream().add_stream(StreamConfig(name=name, subjects=[f"{name}.*"], max_age=60))

    with_client(jetstream_store, create)
    with pytest.raises(InvalidRequest, match=r"can't hold a store: .*max_age must be unlimited"):
        store.event_log(ONE)


def test_servers_that_do_not_sync_are_refused_or_warned_about(tmp_path: Path) -> None:
    with NatsServer(tmp_path / "nats") as server:
        with capture_logs() as logs, closing(JetStreamStore(f"{server.url}/ONE").event_log(ONE)) as log:
            assert log.durability == "process-crash"
        assert [each["event"] for each in logs if "sync" in each["event"]] == ["store.sync_unknown"]
        with closing(JetStreamStore(f"{server.url}/ONE?sync=always").event_log(ONE)) as log:
            assert log.durability == "power-cut"


@pytest.fixture
def monitored(tmp_path: Path) -> Iterator[tuple[NatsServer, str]]:
    """A server that syncs every write, and the address of its monitoring."""
    address = f"{LOOPBACK}:{free_port()}"
    with NatsServer(tmp_path / "nats", sync_always=True, http=address) as server:
        yield server, f"http://{address}"


def restart(server: NatsServer, *, sync_always: bool) -> None:
    server.stop()
    server.set_sync(always=sync_always)
    server.start()


def test_an_owner_whose_server_no_longer_syncs_goes_on_and_promises_less_until_it_does(
    monitored: tuple[NatsServer, str],
) -> None:
    server, monitoring = (
        monitored  # it is restarted, so the connection is replaced, long before a minute is over
    )
    store = JetStreamStore(f"{server.url}/ONE?monitoring={monitoring}")
    with capture_logs() as logs, closing(store.event_log(ONE)) as log:
        assert log.durability == "power-cut"
        restart(server, sync_always=False)
        wait_until(lambda: log.durability == "process-crash")
        append(log, [sent(1)])
        (finding,) = [
            each for each in check_streams(f"{server.url}/ONE?monitoring={monitoring}") if each.advice
        ]
        assert finding.status == "failure"
        with pytest.raises(InvalidRequest, match="acknowledges writes that a power failure can lose"):
            store.event_log(ONE)
        restart(server, sync_always=True)
        wait_until(lambda: log.durability == "power-cut")
    lines = [each for each in logs if each["event"].startswith("store.sync")]
    assert [each["event"] for each in lines] == ["store.sync_lost", "store.sync_restored"]
    assert "set sync_interval: always" in lines[0]["error"]


def test_servers_whose_monitoring_does_not_answer_are_asked_again_before_the_promise_ends(
    monitored: tuple[NatsServer, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CHECK_SECONDS", "RETRY_SECONDS"):
        monkeypatch.setattr(durability, name, 0.01)
    monkeypatch.setattr(durability, "_SECONDS", 0.2)
    server, monitoring = monitored
    with capture_logs() as logs, Proxy(monitoring) as proxy:
        url = f"{server.url}/ONE?monitoring={proxy.url}"
        with closing(JetStreamStore(url).event_log(ONE)) as log:
            proxy.hold_answers()
            asked = proxy.connections
            wait_until(lambda: log.durability == "process-crash")
            assert proxy.connections - asked >= durability.ATTEMPTS
            proxy.release()
            wait_until(lambda: log.durability == "power-cut")
    assert "can't be read" in next(each["error"] for each in logs if each["event"] == "store.sync_lost")
