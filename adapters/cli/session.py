"""One run of a command: its settings and output, and how it comes to a mailbox."""

import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.output import Output
from postroom.adapters.cli.settings import Settings
from postroom.domain.errors import InvalidRequest, NotFound

if TYPE_CHECKING:
    from postroom.adapters.compose import Postroom, Reader
    from postroom.domain.mailbox.events import MailboxMode

MEMORY = "memory:"
DEFAULT_STORE = "postroom.db"
QUEUE_MAILBOX = "main@local"
ARCHIVE_MAILBOX = "archive@local"


class ArchiveSettings(msgspec.Struct, frozen=True):
    """Say in which folder retention stores what it removes; None lets it go."""

    folder: str | None = None


class Session:
    """What every command is given."""

    def __init__(self, command: str, settings: Settings, out: Output) -> None:
        """Take the command's name, for the log and for other processes that find the mailbox owned."""
        self.command = command
        self.settings = settings
        self.out = out

    @property
    def store(self) -> str:
        """Return the store: `memory:`, the path of a file, or the URL of a database."""
        return self.settings.store or DEFAULT_STORE

    @property
    def shown_store(self) -> str:
        """Return the store as it may be shown: a database's URL without the password."""
        from postroom.adapters.compose import shown_store

        return shown_store(self.store)

    @property
    def mailbox(self) -> str:
        """Return the mailbox to use where messages are queued."""
        return self.settings.mailbox or QUEUE_MAILBOX

    def existing_store(self) -> str:
        """Return the store that earlier commands wrote.

        Raises: NotFound when it isn't there, InvalidRequest where it was in memory and so is gone.
        """
        if self.store == MEMORY:
            raise InvalidRequest(
                f"The store memory: is gone when a command ends, so postroom {self.command} has nothing "
                "to work on; name a file with --store or POSTROOM_STORE."
            )
        from postroom.adapters.compose import is_database

        if not is_database(self.store) and not Path(self.store).is_file():
            raise NotFound(
                f"There is no store at {self.store}; send or import a message to make one, "
                "or name another with --store or POSTROOM_STORE."
            )
        return self.store

    def mailboxes(self) -> list[str]:
        """Return the mailboxes to look at: the one that was named, else all of the store."""
        from postroom.adapters.compose import list_mailboxes

        present = list_mailboxes(self.existing_store())
        if self.settings.mailbox is None:
            return present
        return [_present(self.settings.mailbox, present, self.shown_store)]

    def archive(self, given: str | None = None) -> str | None:
        """Return the folder of the archive: the one that was given, else that of the settings, if any.

        Raises: NotFound when the one that was given isn't there.
        """
        if given is not None and not Path(given).is_dir():
            raise NotFound(f"There is no archive at {given}; name the folder that retention stored in.")
        return given or self.settings.section("archive", ArchiveSettings).folder

    @contextmanager
    def read(self, mailbox: str, archive: str | None = None) -> Iterator["Reader"]:
        """Query a mailbox and its archived past, whoever owns it.

        Arguments:
            archive: folder of the archive in place of the settings'.
        """
        from postroom.adapters.compose import read_mailbox

        with read_mailbox(self.existing_store(), mailbox, archive=self.archive(archive)) as reader:
            yield reader

    @asynccontextmanager
    async def own(
        self, mailbox: str | None = None, *, create: bool = False, mode: "MailboxMode" = "queue"
    ) -> AsyncIterator["Postroom"]:
        """Own a mailbox while the context lasts, with the topic policies of the settings in force.

        Arguments:
            create: make the store and the mailbox, in `mode`, where they are missing.

        Raises: NotFound when they are missing and are not to be made.
        """
        from postroom.adapters.compose import list_mailboxes, open_mailbox

        settings = self.settings
        name = mailbox or self.mailbox
        if not create:
            _present(name, list_mailboxes(self.existing_store()), self.shown_store)
        async with open_mailbox(
            self.store,
            name,
            mode=mode,
            durability=settings.durability,
            limits=settings.limits,
            default_policy=settings.policy,
            wait_ms=settings.owner_wait_ms,
            owner=f"postroom {self.command}, process {os.getpid()} on {socket.gethostname()}",
            archive=self.archive(),
        ) as postroom:
            for topic, policy in settings.topics.items():
                try:
                    await postroom.set_topic_policy(topic, policy)
                except InvalidRequest as error:
                    raise InvalidRequest(f'[topics."{topic}"] in {settings.file}: {error}') from error
            yield postroom


def _present(mailbox: str, present: list[str], store: str) -> str:
    if mailbox not in present:
        known = f"it has {', '.join(present)}" if present else "it has none yet"
        raise NotFound(f"The store {store} has no mailbox {mailbox}; {known}. Name one with --mailbox.")
    return mailbox
