"""Context of a command: its settings, its output, and access to mailboxes."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from postroom.adapters.cli.output import Output
from postroom.adapters.cli.settings import Settings
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import describe_choices, is_mailbox

if TYPE_CHECKING:
    from postroom.adapters.compose import OwnerSettings
    from postroom.adapters.compose.connect import SharedMailbox, StoreMailbox
    from postroom.adapters.compose.queries import Reader
    from postroom.adapters.compose.schedule import OutboxDatabases
    from postroom.application.erasure.erase_subject import ErasureSettings
    from postroom.domain.mailbox.events import MailboxMode


MEMORY = "memory:"
IN_MEMORY = ("demo", "import", "serve")
"""Commands that are of use with a store in memory: they show, check, or answer others while they run."""
DEFAULT_STORE = "postroom.db"
QUEUE_MAILBOX = "main@local"
ARCHIVE_MAILBOX = "archive@local"


class ArchiveSettings(msgspec.Struct, frozen=True):
    """Settings of `[archive]`.

    Arguments:
        folder: where retention archives log records before it removes them; None discards them.
        ahead: whether the follower of the read models builds segments as the log grows.
    """

    folder: str | None = None
    ahead: bool = False


class RelaySettings(msgspec.Struct, frozen=True):
    """Settings of `[relay]`.

    Arguments:
        databases: databases other than the store in which `MailboxOutbox` records messages.
    """

    databases: tuple[str, ...] = ()


class OwnerSection(msgspec.Struct, frozen=True):
    """Settings of `[owner]`.

    Arguments:
        listen: `host:port` where the owner of a mailbox in a database accepts connections from other hosts,
            or `off`; None takes the interface of its connection to the database.
    """

    listen: str | None = None

    def validate(self) -> "OwnerSection":
        """Return the settings; raise InvalidRequest when `listen` is not a valid address."""
        if self.listen is not None:
            from postroom.adapters.compose import OwnerSettings

            OwnerSettings(listen=self.listen).check()
        return self


class Session:
    """Context of a command.

    Arguments:
        command: its name, shown to other processes that wait for the mailbox.
        load: loads the settings again from the same flags and environment, and from the file in its argument,
            or without one from the same file.
        check: raises InvalidSettings for an invalid section, even one that the command does not need.
        loaded: the settings as they were loaded, if the command changed some.
    """

    def __init__(
        self,
        command: str,
        settings: Settings,
        out: Output,
        *,
        accept_clock: bool = False,
        load: Callable[..., Settings] | None = None,
        check: Callable[[Settings], None] | None = None,
        loaded: Settings | None = None,
    ) -> None:
        self.command = command
        self.settings = settings
        self.out = out
        self.load = load or (lambda file=None: settings)
        self.check = check or (lambda _: None)
        self.loaded = loaded or settings
        self._accept_clock = accept_clock

    def with_settings(self, settings: Settings) -> "Session":
        """Return a copy of the session with other settings."""
        return Session(
            self.command,
            settings,
            self.out,
            accept_clock=self._accept_clock,
            load=self.load,
            check=self.check,
            loaded=self.loaded,
        )

    @property
    def store(self) -> str:
        """Return the store: `memory:`, the path of a file, or the URL of a database."""
        return self.settings.store or DEFAULT_STORE

    @property
    def shown_store(self) -> str:
        """Return the store for display: a database URL without its password."""
        from postroom.adapters.compose import shown_store

        return shown_store(self.store)

    @property
    def mailbox(self) -> str:
        """Return the mailbox for commands on queues."""
        return self.settings.mailbox or QUEUE_MAILBOX

    @property
    def is_namespace(self) -> bool:
        """Return whether the mailbox is a namespace: several mailboxes of the store, used as one."""
        return not is_mailbox(self.mailbox)

    @property
    def is_remote(self) -> bool:
        """Return whether the store is the URL of a server, not a store of this machine."""
        from postroom.adapters.compose.store import is_remote

        return is_remote(self.store)

    def existing_store(self) -> str:
        """Return the store after checking that it exists.

        Raises: NotFound when it does not exist, InvalidRequest for `memory:` and for the URL of a server.
        """
        self._refuse_server()
        if self.store == MEMORY:
            raise InvalidRequest(
                f"The store memory: ends with the command, so postroom {self.command} has nothing to read; "
                "name a file with --store or POSTROOM_STORE."
            )
        from postroom.adapters.compose.store import has_store

        if not has_store(self.store):
            raise NotFound(
                f"There is no store at {self.store}; send or import a message to create it, "
                "or name another with --store or POSTROOM_STORE."
            )
        return self.store

    def _check_folder(self) -> None:
        """Raise NotFound if the store's folder is missing: unlike in an outage, a retry would not help."""
        from postroom.adapters.compose.store import has_store

        if has_store(self.store):
            return
        path = Path(self.store)
        problem = f"{path} is a folder" if path.is_dir() else None
        if problem is None and not path.parent.is_dir():
            problem = f"The folder {path.parent} does not exist"
        if problem is not None:
            raise NotFound(f"{problem}; name a file in a folder that exists with --store or POSTROOM_STORE.")

    def mailboxes(self) -> list[str]:
        """Return the mailboxes that the settings name, or all mailboxes of the store."""
        from postroom.adapters.compose import list_mailboxes

        mailboxes = list_mailboxes(self.existing_store())
        if self.settings.mailbox is None:
            return mailboxes
        return _check_mailbox(self.settings.mailbox, mailboxes, self.shown_store)

    def archive(self, folder: str | None = None) -> str | None:
        """Return the folder or URL of the archive to read, or None to read no archive.

        Arguments:
            folder: value of `--archive`; empty reads no archive, and None takes the setting, if any.

        Raises: NotFound if `folder` does not exist.
        """
        if folder and "://" not in folder and not Path(folder).is_dir():
            raise NotFound(f"There is no archive at {folder}; name the folder that retention archives to.")
        setting = self.settings.section("archive", ArchiveSettings).folder
        return (setting if folder is None else folder) or None

    @contextmanager
    def read(self, mailbox: str, archive: str | None = None) -> Iterator["Reader"]:
        """Open a mailbox and its archive for queries, whether or not another process owns it.

        Arguments:
            archive: the archive's folder; None takes the one of the settings.
        """
        from postroom.adapters.compose.queries import read_mailbox

        store = self.existing_store()
        self.check_one_mailbox(mailbox)
        with read_mailbox(
            store, mailbox, archive=self.archive(archive), erasure=self.erasure_settings()
        ) as reader:
            yield reader

    def _needs_one_mailbox(self, namespace: str) -> InvalidRequest:
        names = ", ".join(self.mailboxes())
        return InvalidRequest(
            f"postroom {self.command} is for one mailbox, and {namespace} is a namespace; name one of its "
            f"mailboxes with --mailbox: {names}."
        )

    def why_empty(self, topic: str) -> str | None:
        """Return the reason why a receive would deliver nothing, or None if it would change the mailbox.

        It is None for a namespace: a receive asks the owners of its mailboxes.

        Raises: NotFound when the store or the mailbox is missing.
        """
        if self.is_namespace:
            return None
        from postroom.adapters.compose.queries import read_mailbox

        with read_mailbox(self.existing_store(), self.mailbox) as reader:
            return reader.why_empty(topic)

    @asynccontextmanager
    async def use(self, mailbox: str | None = None, **options: Any) -> AsyncIterator["SharedMailbox"]:
        """Use one mailbox until the context manager exits; see `use_any`.

        Raises: InvalidRequest for a namespace; else as `use_any` does.
        """
        from postroom.adapters.compose.connect import SharedMailbox

        self.check_one_mailbox(mailbox)
        async with self.use_any(mailbox, **options) as shared:
            assert isinstance(shared, SharedMailbox), "it is no namespace"
            yield shared

    def check_one_mailbox(self, mailbox: str | None = None) -> None:
        """Raise InvalidRequest for a namespace."""
        if not is_mailbox(mailbox or self.mailbox):
            raise self._needs_one_mailbox(mailbox or self.mailbox)

    @asynccontextmanager
    async def use_any(
        self,
        mailbox: str | None = None,
        *,
        create: bool = False,
        mode: "MailboxMode | None" = None,
        amnesia: bool = False,
        owner_timeout_ms: int | None = None,
        gives_settings: bool = True,
        in_thread: bool = True,
    ) -> AsyncIterator["StoreMailbox"]:
        """Use a mailbox, or a namespace as one mailbox, until the context manager exits.

        If no process owns the mailbox, this one does; otherwise its commands go to the owner.

        Arguments:
            create: create the store and the mailbox, in `mode`, if they do not exist.
            amnesia: forget settled messages; the store must be `memory:`.
            owner_timeout_ms: see `connect`; None takes its default.
            gives_settings: refuse a mailbox that has other settings than the file and the environment.
            in_thread: see `share_mailbox`.

        Raises: SettingsConflict; InvalidRequest for `memory:` unless the command is useful with a store that
            ends with it; NotFound when they do not exist and `create` is false, or the store's folder does
            not exist.
        """
        from postroom.adapters.compose import list_mailboxes
        from postroom.adapters.compose.connect import OWNER_TIMEOUT_MS, share_mailbox

        self._refuse_server()
        settings = self.settings
        name = mailbox or self.mailbox
        if create:
            if self.store == MEMORY and self.command not in IN_MEMORY:
                raise InvalidRequest(
                    f"The store memory: ends with the command, so what postroom {self.command} does would be "
                    "lost; name a file with --store or POSTROOM_STORE."
                )
            self._check_folder()
        else:
            mailboxes = await asyncio.to_thread(lambda: list_mailboxes(self.existing_store()))
            _check_mailbox(name, mailboxes, self.shown_store)
        owner_settings = self.owner_settings(gives_settings=gives_settings)._replace(
            mode=mode, amnesia=amnesia
        )
        options: dict[str, Any] = {
            "timeout_ms": settings.timeout_ms,
            "owner_timeout_ms": owner_timeout_ms or OWNER_TIMEOUT_MS,
            "settings": owner_settings,
            "in_thread": in_thread,
        }
        opening: AbstractAsyncContextManager[StoreMailbox]
        if "@" in name:
            opening = share_mailbox(self.store, name, **options)
        else:
            from postroom.adapters.compose.store_namespace import share_namespace

            opening = share_namespace(self.store, name, share_mailbox, **options)
        async with opening as shared:
            yield shared

    def owner_settings(self, *, gives_settings: bool = True) -> "OwnerSettings":
        """Return how this process opens the mailboxes that it owns.

        Arguments:
            gives_settings: see `use_any`.
        """
        from postroom.adapters.compose import OwnerSettings
        from postroom.domain.settings import UNCHANGED

        settings = self.settings
        return OwnerSettings(
            durability=settings.durability,
            settings=settings.mailbox_settings() if gives_settings else UNCHANGED,
            owner=f"postroom {self.command}, process {os.getpid()} on {socket.gethostname()}",
            archive=self.archive(),
            accept_clock=self._accept_clock,
            outboxes=settings.section("relay", RelaySettings).databases,
            listen=settings.section("owner", OwnerSection).listen,
            erasure=self.erasure_settings(),
        )

    def outbox_databases(self, others: Sequence[str] = ()) -> "OutboxDatabases":
        """Return the databases in which recorded messages are counted.

        Arguments:
            others: databases besides the store and the databases of [relay] and [messaging].
        """
        from postroom.adapters.compose.schedule import OutboxDatabases

        messaging = self.settings.sections.get("messaging", {}).get("database")
        services = [messaging] if isinstance(messaging, str) else []
        return OutboxDatabases(
            self.store, self.settings.section("relay", RelaySettings).databases, [*services, *others]
        )

    def erasure_settings(self) -> "ErasureSettings | None":
        """Return the settings of encryption, or None if nothing is encrypted."""
        if not self.settings.sections["erasure"]:
            return None
        from postroom.application.erasure.erase_subject import ErasureSettings

        return self.settings.section("erasure", ErasureSettings).validate()  # makes paths absolute

    def writable_store(self) -> str:
        """Return the store after checking that it can be created.

        Raises: NotFound when its folder does not exist, InvalidRequest for the URL of a server.
        """
        self._refuse_server()
        self._check_folder()
        return self.store

    def _refuse_server(self) -> None:
        if self.is_remote:
            raise InvalidRequest(
                f"postroom {self.command} uses the store itself, not a server; run it where the store is, or "
                f"ask the server over HTTP or gRPC."
            )


def _check_mailbox(name: str, mailboxes: list[str], store: str) -> list[str]:
    """Return the mailbox or the members of the namespace; raise NotFound if the store has neither."""
    if not is_mailbox(name):
        from postroom.domain.namespace import find_fixed_members

        names = [*find_fixed_members(mailboxes, name)]
    else:
        names = [name] if name in mailboxes else []
    if not names:
        choices = describe_choices(name, mailboxes)
        kind = "mailbox" if is_mailbox(name) else "namespace"
        raise NotFound(f"The store {store} has no {kind} {name}; {choices} Name one with --mailbox.")
    return names
