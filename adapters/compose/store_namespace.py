"""A namespace in one store: its mailboxes, each with an owner, as one mailbox (ADR 0137)."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any

import uuid_utils

from postroom.adapters.compose import OwnerSettings, open_owner_store, own_mailbox, socket_path
from postroom.adapters.compose.store import Store
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.application.cluster.namespace_members import FixedMembers
from postroom.application.cluster.store_receiver import StoreReceiver
from postroom.application.messages import NewMessage, Sent
from postroom.application.metrics import Metric
from postroom.application.telemetry import logger
from postroom.domain.arguments import check_items
from postroom.domain.errors import InvalidRequest, MailboxOwned, NotFound, Rejected
from postroom.domain.names import check_member
from postroom.domain.namespace import (
    RESERVED_TOPIC,
    find_fixed_members,
    home_of,
    name_fixed_members,
)

CREATION_WAIT_MS = 10_000
MAX_KEYS = 65_536
"""Number of keys whose mailboxes a client remembers, so that it need not hash them for each mailbox."""
PEER_SECONDS = 1.0
"""Pause between two attempts to own a mailbox that another process owns for the same purpose."""


class StoreNamespace(NamespaceMailbox):
    """The mailboxes of a namespace in one store, as one mailbox."""

    def __init__(self, namespace: str, members: Mapping[str, SharedMailbox], timeout_ms: int) -> None:
        """Take the members by name."""
        self._mailboxes = members
        self._homes_of_keys: dict[str, SharedMailbox] = {}
        directory = _Directory(namespace, members)
        super().__init__(directory, timeout_ms, uuid_utils.uuid7, FixedMembers(tuple(members)))

    def _make_receiver(self) -> StoreReceiver:
        return StoreReceiver(self._mailboxes, self._homes)

    async def send_message(self, message: NewMessage, /) -> Sent:
        """Send a message; see `Mailbox.send_message`."""
        return await self._home_of(message).send_message(message)

    async def send_batch(self, messages: Sequence[NewMessage], /) -> list[Sent | Rejected]:
        """Send messages; see `Mailbox.send_batch`.

        The members never change, so each member generates the ids of its messages and need not look them up
        in its log.
        """
        items: list[Any] = [*check_items("messages", messages)]
        groups: dict[str, list[int]] = {}
        for index, message in enumerate(items):
            groups.setdefault(self._home_of(message).name, []).append(index)
        sending = (
            self._mailboxes[name].send_batch([items[index] for index in group])
            for name, group in groups.items()
        )
        answers: dict[int, Sent | Rejected] = {}
        answered = await asyncio.gather(
            *sending, return_exceptions=True
        )  # so that no send continues after an error
        for group, some in zip(groups.values(), answered, strict=True):
            if isinstance(some, BaseException):
                raise some
            answers.update(zip(group, some, strict=True))
        return [answers[index] for index in range(len(items))]

    def _home_of(self, message: object) -> SharedMailbox:
        """Return the mailbox of a message; for a malformed message, return any mailbox, which refuses it."""
        topic = getattr(message, "topic", "")
        if topic == RESERVED_TOPIC:
            self._prepare(message)  # raises the error for a reserved topic
        key = getattr(message, "sticky_key", None) or topic
        if not isinstance(key, str):
            key = ""
        home = self._homes_of_keys.get(key)
        if home is None:
            if len(self._homes_of_keys) >= MAX_KEYS:
                self._homes_of_keys.clear()
            self._homes_of_keys[key] = home = self._mailboxes[home_of(key, self._mailboxes)]
        return home

    async def measure(self) -> list[Metric]:
        """Return the metrics of all members, as their owners measure them."""
        return [metric for each in self._mailboxes.values() for metric in await each.measure()]

    async def measure_owned(self) -> list[Metric]:
        """Return the metrics of the members that this process owns and can use."""
        return [metric for each in self._mailboxes.values() for metric in await each.measure_owned()]


class _Directory:
    """`NamespaceDirectory` of mailboxes that are always there: whoever calls one may become its owner."""

    def __init__(self, namespace: str, members: Mapping[str, SharedMailbox]) -> None:
        self.namespace = namespace
        self._members = members

    async def list_members(self) -> Sequence[str]:
        return list(self._members)

    def mailbox(self, name: str) -> SharedMailbox:
        return self._members[name]

    poller = mailbox


@asynccontextmanager
async def share_namespace(
    store: str,
    namespace: str,
    share_mailbox: Callable[..., AbstractAsyncContextManager[SharedMailbox]],
    *,
    timeout_ms: int,
    settings: OwnerSettings | None = None,
    **options: Any,
) -> AsyncIterator[StoreNamespace]:
    """Use the mailboxes of a namespace in a store as one, while the context lasts.

    Arguments:
        share_mailbox: opens each of them, with these options.

    Raises: NotFound when the store has no such namespace; else as `share_mailbox` does.
    """
    check_member("The namespace", namespace)
    place = open_owner_store(store, (settings or OwnerSettings()).check())
    names = find_fixed_members(await asyncio.to_thread(place.mailboxes), namespace)
    if not names:
        raise _no_namespace(place, namespace)
    async with AsyncExitStack() as opened:
        members = {}
        for name in names:
            sharing = share_mailbox(store, name, timeout_ms=timeout_ms, settings=settings, **options)
            members[name] = await opened.enter_async_context(sharing)
        shared = StoreNamespace(namespace, members, timeout_ms)
        opened.push_async_callback(shared.close)
        yield shared


async def create_namespace(
    store: str, namespace: str, count: int | None, settings: OwnerSettings | None = None
) -> tuple[str, ...]:
    """Return the mailboxes of a namespace in a store, and create those that are missing.

    Arguments:
        count: number of mailboxes of a new namespace, and so of its owners; None takes those that exist.

    Raises: InvalidRequest when the namespace has another number of mailboxes, or the store is in memory;
        NotFound when it does not exist and `count` is None; else as `open_mailbox` does.
    """
    check_member("The namespace", namespace)
    checked = (settings or OwnerSettings()).check()
    place = open_owner_store(store, checked)
    if socket_path(place, f"{namespace}@") is None:
        raise InvalidRequest(
            "A store in memory has no other processes that could own mailboxes; name a file or a database."
        )
    names = () if count is None else name_fixed_members(namespace, count)
    # The lock orders processes that create the namespace with different numbers; no mailbox has the lock's
    # name.
    async with place.ownership().acquire(f"{namespace}@", checked.owner or "", CREATION_WAIT_MS):
        mailboxes = await asyncio.to_thread(place.mailboxes)
        existing = find_fixed_members(mailboxes, namespace)
        if not existing and not names:
            raise _no_namespace(place, namespace)
        if existing and names and existing != names:
            raise InvalidRequest(
                f"Namespace {namespace} of {place.where} has {len(existing)} mailboxes, not {len(names)}; "
                "their number can't be changed, as keys would move. Leave --owners out, or create another "
                "namespace."
            )
        names = existing or names
        for name in names:
            if name not in mailboxes:
                async with own_mailbox(place, name, checked, CREATION_WAIT_MS):
                    pass
    return names


def _no_namespace(place: Store, namespace: str) -> NotFound:
    return NotFound(
        f"The store {place.where} has no namespace {namespace}; create it with postroom own --mailbox "
        f"{namespace} --owners COUNT, or name a mailbox, such as {namespace}@local."
    )


async def own_for_others(
    store: str,
    mailbox: str,
    settings: OwnerSettings,
    owned: Callable[[], None],
    is_peer: Callable[[str], bool],
) -> None:
    """Own a mailbox for the processes that call it, until cancelled.

    This process replaces an owner that was there first, which then calls this process.

    Arguments:
        owned: called whenever this process has become the owner.
        is_peer: returns whether the owner with a given name owns for others, too; this process then waits
            until that owner ends.

    Raises: as `open_mailbox` does, except MailboxOwned.
    """
    checked = settings.check()
    place = open_owner_store(store, checked)
    ownership = place.ownership()
    while True:
        try:
            async with own_mailbox(place, mailbox, checked, 0) as opened:
                owned()
                await opened.engine.wait_until_lost()
        except MailboxOwned as error:
            if not is_peer(error.owner) and (incumbent := await ownership.incumbent(mailbox)) is not None:
                logger().info("mailbox.owner_replaced", mailbox=mailbox, owner=error.owner)
                await ownership.evict(mailbox, incumbent)
                continue
        await asyncio.sleep(PEER_SECONDS)
