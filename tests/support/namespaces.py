"""A namespace whose mailboxes are in this process, as clients of a cluster find them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import uuid_utils

from postroom.adapters.compose import open_mailbox
from postroom.application.cluster.members_history import MembersFence
from postroom.application.cluster.namespace_mailbox import NamespaceMailbox
from postroom.application.cluster.namespace_members import current_generation
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import Unavailable

FENCED = (
    "send_message",
    "send_batch",
    "set_topic_policy",
    "pause_topic",
    "resume_topic",
    "set_subscription",
    "rewind_subscription",
    "delete_subscription",
    "set_schedule",
)
TIMEOUT_MS = 3_000


class Member:
    """A mailbox behind its fence, as a server with gRPC has it.

    Arguments:
        is_fenced: False for a server that forgot its fence.
    """

    def __init__(
        self, mailbox: Mailbox, *, is_fenced: bool = True, fence: MembersFence | None = None
    ) -> None:
        self._mailbox = mailbox
        self._fence = fence or MembersFence(mailbox)
        self._is_fenced = is_fenced
        self.is_down = False
        self.is_down_for: set[str] = set()
        """Operations that fail as if it were down."""

    def seen_as(self, mailbox: Mailbox) -> "Member":
        """Return the mailbox as the bearer of a token may use it, behind the same fence."""
        return Member(mailbox, fence=self._fence)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._mailbox, name)
        if name == "name":
            return call

        async def guarded(*arguments: Any, **options: Any) -> Any:
            if self.is_down or name in self.is_down_for:
                raise Unavailable(f"{self._mailbox.name} is down.", 1)
            if name == "receive_messages":
                await self._fence.check(current_generation())
            if name not in FENCED:
                return await call(*arguments, **options)
            sent = arguments[0] if isinstance(arguments[0], Sequence) else [arguments[0]]
            topics = {getattr(each, "topic", "") for each in sent}
            topic = "$members" if "$members" in topics else ""
            if not (self._is_fenced or topic):
                return await call(*arguments, **options)
            async with self._fence.admit(current_generation(), topic):
                return await call(*arguments, **options)

        return guarded


class Directory:
    """`NamespaceDirectory` with the view of one client: its `names` are those that a proxy told it of."""

    def __init__(
        self, namespace: str, members: dict[str, Member], names: Sequence[str] | None = None
    ) -> None:
        self.namespace = namespace
        self.names = names
        self._members = members

    async def list_members(self) -> Sequence[str]:
        return list(self._members) if self.names is None else self.names

    def mailbox(self, name: str) -> Any:
        return self._members[name]

    poller = mailbox


@asynccontextmanager
async def open_namespace(*names: str) -> AsyncIterator[NamespaceMailbox]:
    """Open mailboxes in memory, and use them as one."""
    async with AsyncExitStack() as opened:
        members = {
            name: Member(await opened.enter_async_context(open_mailbox("memory:", name))) for name in names
        }
        directory = Directory(names[0].partition("@")[0], members)
        namespace = NamespaceMailbox(directory, TIMEOUT_MS, uuid_utils.uuid7)
        opened.push_async_callback(namespace.close)
        await namespace.open()
        yield namespace
