"""The mailbox conformance suite on every adapter."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from postroom.adapters.compose import OwnedMailbox, OwnerSettings, open_mailbox
from postroom.adapters.compose.connect import connect, connect_remote, share_mailbox
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.adapters.compose.store_namespace import create_namespace
from postroom.adapters.sync_mailbox import SyncMailbox, SyncMessageStream
from postroom.adapters.system.clock import SystemClock
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.errors import InvalidRequest
from postroom.domain.subject import SubjectPolicy
from postroom.domain.subscription import SubscriptionFilter
from tests.conformance.mailbox import MailboxConformance
from tests.conformance.mailbox_schedules import DAILY
from tests.conformance.mailbox_search import MailboxSearchConformance
from tests.support.access import Controlled
from tests.support.erasure import new_erasure
from tests.support.local_cluster import LocalCluster
from tests.support.namespaces import open_namespace
from tests.support.stores import MAILBOX, message

RELAXED = OwnerSettings(durability="relaxed")
STORES = ["sqlite", *(pytest.param(each, marks=pytest.mark.extended) for each in ("postgres", "jetstream"))]
"""Stores of a surface that calls owners, which do the rest and have their own tests on every store."""


def store_of(request: pytest.FixtureRequest, folder: Path) -> str:
    """Return the address of a new store of the kind that the test is parametrized with."""
    if request.param == "postgres":
        return str(request.getfixturevalue("postgres_store"))
    if request.param == "jetstream":
        return str(request.getfixturevalue("jetstream_store"))
    return str(folder / "store.db") if request.param == "sqlite" else "memory:"


class TestOwnedMailbox(MailboxConformance):
    @pytest.fixture(params=["memory:", "sqlite", "postgres", "jetstream"])
    async def mailbox(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OwnedMailbox]:
        async with open_mailbox(store_of(request, tmp_path), MAILBOX, durability="relaxed") as opened:
            yield opened


class Encrypted:
    """Every message is encrypted, which no sender and no consumer notices."""

    keys: str | None = None
    store = "memory:"

    @pytest.fixture
    async def mailbox(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[OwnedMailbox]:
        erasure = new_erasure(tmp_path, {"*": SubjectPolicy("attrs.subject")}, keys=self.keys)
        monkeypatch.setattr("postroom.application.erasure.protection.read_subject", lambda *_: "somebody")
        async with open_mailbox(self.store, MAILBOX, erasure=erasure, durability="relaxed") as opened:
            yield opened


class TestEncryptedMailbox(Encrypted, MailboxConformance):
    """All topics are encrypted, so no schedule may send to them."""

    async def test_a_schedule_is_refused(self, mailbox: Mailbox) -> None:
        with pytest.raises(InvalidRequest, match="the payload of a schedule in the clear"):
            await mailbox.set_schedule("daily", DAILY)

    test_a_schedule_sends_its_message = test_a_schedule_is_refused
    test_a_schedule_is_set_again_without_effect_and_changed = test_a_schedule_is_refused
    test_a_schedule_is_paused_resumed_and_run_now = test_a_schedule_is_refused
    test_a_worker_leaves_what_an_operator_changed_until_its_code_changes = test_a_schedule_is_refused


class TestEncryptedMailboxInPostgres(Encrypted):
    """Store and key store in two databases of PostgreSQL: the tests that concern the content of messages."""

    test_headers = MailboxConformance.test_a_message_that_was_sent_is_received_with_all_its_headers
    test_idempotency_key = MailboxConformance.test_a_repeated_send_with_an_idempotency_key_adds_nothing
    test_id_of_sender = MailboxConformance.test_an_id_of_the_sender_is_never_reused
    test_peek = MailboxConformance.test_messages_can_be_looked_at_without_receiving_them
    test_redrive = (
        MailboxConformance.test_a_message_is_dead_lettered_after_its_last_attempt_and_can_be_redriven
    )
    test_explain = MailboxConformance.test_a_message_is_explained
    test_retention = MailboxConformance.test_old_events_are_deleted_up_to_the_oldest_unsettled_message

    @pytest.fixture(autouse=True)
    def _databases(self, postgres_store: str, keys_database: str) -> None:
        self.store, self.keys = postgres_store, keys_database


class TestSharedMailboxOfItsOwner(MailboxConformance):
    @pytest.fixture(params=["memory:", "sqlite"])
    async def mailbox(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mailbox]:
        async with share_mailbox(store_of(request, tmp_path), MAILBOX, settings=RELAXED) as shared:
            yield shared


class TestSharedMailboxOfAnother(MailboxConformance):
    @pytest.fixture(params=STORES)
    async def mailbox(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mailbox]:
        store = store_of(request, tmp_path)
        async with (
            open_mailbox(store, MAILBOX, durability="relaxed"),
            share_mailbox(store, MAILBOX) as shared,
        ):
            yield shared


class TestAuthorizedMailbox(MailboxConformance, MailboxSearchConformance):
    @pytest.fixture
    async def mailbox(self) -> AsyncIterator[Mailbox]:
        async with open_mailbox("memory:", MAILBOX) as owned:
            controlled = Controlled(owned, SystemClock())
            yield (await controlled.control.open_session(controlled.issue())).mailbox


class TestNamespaceOfOneMailbox(MailboxConformance, MailboxSearchConformance):
    @pytest.fixture
    async def mailbox(self) -> AsyncIterator[Mailbox]:
        async with open_namespace(MAILBOX) as namespace:
            yield namespace

    def test_a_mailbox_has_its_name(self, mailbox: Mailbox) -> None:
        assert mailbox.name == MAILBOX.partition("@")[0]


class TestNamespaceOfSeveralMailboxes(TestNamespaceOfOneMailbox):
    @pytest.fixture
    async def mailbox(self) -> AsyncIterator[Mailbox]:
        async with open_namespace("acme@a", "acme@b", "acme@c") as namespace:
            yield namespace

    async def test_the_backlog_is_counted_now_and_as_it_was(self, mailbox: Mailbox) -> None:
        """Of several mailboxes only a time is a moment, not a position."""
        before = await mailbox.get_backlog()
        await mailbox.send_batch([message(), message(topic="others")])
        assert (await mailbox.get_backlog()).ready == 2
        assert (await mailbox.get_backlog(at=datetime.fromisoformat(before.as_of))).shards == []
        with pytest.raises(InvalidRequest, match="no position in common"):
            await mailbox.get_backlog(at=before.position)
        with pytest.raises(InvalidRequest, match="in the future"):
            await mailbox.get_backlog(at=datetime(2500, 1, 1, tzinfo=UTC))


class TestNamespaceOfAStore(MailboxConformance):
    """A namespace of three mailboxes: this client owns one, and calls the owners of the others."""

    test_a_mailbox_has_its_name = TestNamespaceOfOneMailbox.test_a_mailbox_has_its_name
    test_the_backlog_is_counted_now_and_as_it_was = (
        TestNamespaceOfSeveralMailboxes.test_the_backlog_is_counted_now_and_as_it_was
    )

    @pytest.fixture(params=STORES)
    async def mailbox(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mailbox]:
        store, namespace = store_of(request, tmp_path), MAILBOX.partition("@")[0]
        first, second, _ = await create_namespace(store, namespace, 3, RELAXED)
        async with (
            open_mailbox(store, first, durability="relaxed"),
            open_mailbox(store, second, durability="relaxed"),
            connect(store, namespace, durability="relaxed") as connected,
        ):
            yield connected

    async def test_a_subscription_gets_a_copy_of_each_message_that_matches(self, mailbox: Mailbox) -> None:
        """Copies of topics that are in different mailboxes have no order."""
        await mailbox.set_subscription("mail", SubscriptionFilter(("orders.*",), {"kind": "a"}))
        a, b = {"kind": "a"}, {"kind": "b"}
        sent = [message(b"1", topic="orders.eu", attrs=a), message(b"2", topic="orders.us", attrs=a)]
        await mailbox.send_batch([*sent, message(b"no", topic="orders.us", attrs=b)])
        received = [*await mailbox.receive_messages("mail"), *await mailbox.receive_messages("mail")]
        assert {each.payload for each in received} == {b"1", b"2"}
        await mailbox.ack_messages([each.receipt for each in received])
        assert (await mailbox.get_backlog("mail")).shards == []


class TestMailboxOverNetwork(MailboxConformance, MailboxSearchConformance):
    @pytest.fixture(params=["http", "grpc+unix"])
    async def mailbox(self, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Mailbox]:
        protocol, _, is_unix = request.param.partition("+")
        address = f"unix:{tmp_path}/socket" if is_unix else "127.0.0.1:0"
        surface = (
            open_http_surface(address, HttpSettings()) if protocol == "http" else open_grpc_surface(address)
        )
        async with (
            open_mailbox("memory:", MAILBOX) as owned,
            serve_mailbox("memory:", owned, [surface], access=unrestricted) as (served,),
            connect_remote(served, timeout_ms=3_000) as client,
        ):
            yield client


class TestMailboxOfACluster(MailboxConformance, MailboxSearchConformance):
    @pytest.fixture
    async def mailbox(self) -> AsyncIterator[Mailbox]:
        async with LocalCluster() as cluster:
            await cluster.move(MAILBOX, await cluster.add_owner())
            async with connect_remote(f"postroom://{cluster.proxy}/{MAILBOX}", timeout_ms=3_000) as client:
                yield client


class Unsynced:
    """A `SyncMailbox` called from threads, so that the suite can await it."""

    def __init__(self, mailbox: SyncMailbox) -> None:
        self._mailbox = mailbox
        self.name = mailbox.name

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._mailbox, name)
        if name == "stream_messages":
            return lambda *arguments, **options: UnsyncedStream(self, call(*arguments, **options))

        async def in_thread(*arguments: Any, **options: Any) -> Any:
            result = await asyncio.to_thread(call, *arguments, **options)
            return [ReceivedMessage(each.delivery, self) for each in result] if "receive" in name else result

        return in_thread


class UnsyncedStream:
    """A `SyncMessageStream` whose calls are made in a thread."""

    def __init__(self, mailbox: Unsynced, stream: SyncMessageStream) -> None:
        self._mailbox = mailbox
        self._stream = stream
        self._next: asyncio.Future[Any] | None = None

    async def __aenter__(self) -> "UnsyncedStream":
        await asyncio.to_thread(self._stream.__enter__)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._stream.close)
        if self._next is not None:
            await self._next  # closing has ended the iteration of the thread

    def __aiter__(self) -> "UnsyncedStream":
        return self

    async def __anext__(self) -> ReceivedMessage:
        if self._next is None:  # a thread that was left waiting is used again
            self._next = asyncio.ensure_future(asyncio.to_thread(next, self._stream, None))
        received = await asyncio.shield(self._next)
        self._next = None
        if received is None:
            raise StopAsyncIteration
        return ReceivedMessage(received.delivery, self._mailbox)


class TestSyncMailbox(MailboxConformance):
    @pytest.fixture
    async def mailbox(self) -> AsyncIterator[Unsynced]:
        synced = await asyncio.to_thread(connect("memory:", MAILBOX).sync)
        yield Unsynced(synced)
        await asyncio.to_thread(synced.close)
