"""Wiring of access control: keys, the log of capabilities, and the control of a served mailbox."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.keys.file import SUFFIX, FileKeyRing
from postroom.adapters.memory.key_ring import MemoryKeyRing
from postroom.adapters.postgres.url import is_url
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit import AuditLog
from postroom.application.access.control import AccessControl
from postroom.application.access.key_ring import KeyRing
from postroom.application.access.settings import AccessSettings
from postroom.application.background import background_task
from postroom.application.extras import explain_missing_extra
from postroom.application.ports.mailbox import Mailbox
from postroom.application.service import Search
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import CAPABILITY_LOG

if TYPE_CHECKING:  # eventsourcing is slow to import
    from postroom.application.access.capabilities import Capabilities


def open_key_ring(store: str, path: str | None = None) -> KeyRing:
    """Return the root keys of a store.

    Arguments:
        path: of the key file; None is the path of a SQLite file with `.keys` appended, and memory for a store
            in memory.

    Raises: InvalidRequest when a database has no path of its keys.
    """
    if path is not None:
        return FileKeyRing(check_path("The path of the key file", path))
    if store == MEMORY:
        return MemoryKeyRing()
    if is_url(store):
        raise InvalidRequest(
            "The keys of a store in a database are in a file, whose path is missing; give one, outside the "
            "database."
        )
    return FileKeyRing(check_path("store", store) + SUFFIX)


@contextmanager
def open_capabilities(store: str, keys: KeyRing | None = None) -> "Iterator[Capabilities]":
    """Open the log of the capabilities of a store, to issue and revoke them.

    Arguments:
        keys: needed to issue capabilities and to rotate keys only.

    Raises: MissingExtra when `eventsourcing` is not installed, Unavailable when the store can't be used.
    """
    with explain_missing_extra("serve"):
        from postroom.adapters.recorder import LogRecorder
        from postroom.application.access.capabilities import Capabilities

    clock = SystemClock()
    log = open_store(store).event_log(CAPABILITY_LOG)
    try:
        yield Capabilities(LogRecorder(log, clock.wall), keys or MemoryKeyRing(), clock.wall)
    finally:
        log.close()


@asynccontextmanager
async def open_access_control(
    mailbox: Mailbox,
    search: Search,
    capabilities: "Capabilities",
    keys: KeyRing,
    audit: AuditLog,
    settings: AccessSettings | None = None,
) -> AsyncIterator[AccessControl]:
    """Check the tokens of callers of a mailbox for as long as the context lasts.

    Raises: InvalidRequest when there is no key, Unavailable when keys or revocations can't be read.
    """
    control = AccessControl(mailbox, search, keys, capabilities, audit, SystemClock(), settings)
    await control.refresh()
    if not keys.root_keys():
        raise InvalidRequest(
            "There is no key to check capabilities with; create one with postroom token rotate, or serve "
            "with --dev."
        )
    async with background_task(control.run()):
        yield control
