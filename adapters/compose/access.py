"""Capabilities of a store: their keys, the control of access by them, and the audit log."""

import asyncio
import os
import pwd
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing, contextmanager
from secrets import token_bytes
from typing import TYPE_CHECKING
from weakref import WeakSet

import msgspec

from postroom.adapters.compose.store import MEMORY, Store, is_on_servers, open_store
from postroom.adapters.key_rings import SUFFIX, FileKeyRing, MemoryKeyRing
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit import ALLOWED, AuditEntry, AuditLog
from postroom.application.access.audit_log import RETENTION_MS, ReadAudit, StoredAuditLog, verify_audit
from postroom.application.access.authority import Authority, KeyRing, RevocationLog, Revocations
from postroom.application.access.control import AccessControl
from postroom.application.access.guard import AccessSettings
from postroom.application.anchors import Anchor
from postroom.application.extras import explain_missing_extra
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import Verification, VerifyLog
from postroom.application.service import OpenSession, Search
from postroom.application.threads import background_task
from postroom.domain.arguments import check_int, check_path
from postroom.domain.capability.rights import Expires, Right, Rights
from postroom.domain.capability.token import (
    KEY_ID_BYTES,
    NONCE_BYTES,
    SECRET_BYTES,
    Identifier,
    RootKey,
    Token,
    complete,
    mint,
    read_access_key,
)
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import AUDIT_LOG, CAPABILITY_LOG
from postroom.domain.policy import DAY_MS

if TYPE_CHECKING:  # eventsourcing is slow to import
    from postroom.application.access.capabilities import Capabilities


HOUR_MS = 3_600_000
MAX_RETENTION_MS = 10 * 366 * 24 * HOUR_MS
MEMORY_ENTRIES = 10_000
"""Maximum number of entries of an audit log in memory."""


class AuditSettings(msgspec.Struct, frozen=True):
    """Settings of `[audit]`.

    Arguments:
        retention_ms: age after which audit entries are removed, an hour to 10 years.
    """

    retention_ms: int = RETENTION_MS

    def validate(self) -> "AuditSettings":
        """Return the settings, or raise InvalidRequest."""
        check_int("The audit log's retention_ms", self.retention_ms, HOUR_MS, MAX_RETENTION_MS)
        return self


class AuditReader:
    """The queries on the audit log of a store; any number of readers is allowed."""

    def __init__(self, log: EventLogReader) -> None:
        self.log = log
        self.read: ReadAudit = ReadAudit(log)
        self.verify: VerifyLog = verify_audit(log)


@asynccontextmanager
async def open_audit_log(
    store: Store, settings: AuditSettings | None = None
) -> AsyncIterator[StoredAuditLog]:
    """Open the audit log of a store for writing, and remove expired entries, while the context lasts.

    Raises: InvalidRequest for settings out of bounds, Unavailable when the store can't be used.
    """
    retention_ms = (settings or AuditSettings()).validate().retention_ms
    max_entries = MEMORY_ENTRIES if store.identity == MEMORY else None
    log = await asyncio.to_thread(store.event_log, AUDIT_LOG)
    audit = StoredAuditLog(log, SystemClock(), retention_ms=retention_ms, max_entries=max_entries)
    try:
        async with background_task(audit.run()):
            yield audit
    finally:
        await audit.close()


def verify_reserved_logs(store: str, anchors: Sequence[Anchor] = ()) -> list[Verification]:
    """Verify the reserved logs of a store; missing ones are skipped.

    Arguments:
        anchors: see `VerifyLog`.

    Raises: BrokenLog with the first position that fails, Unavailable when the store can't be read.
    """
    verifications = []
    for name, verify in ((AUDIT_LOG, verify_audit), (CAPABILITY_LOG, VerifyLog)):
        with _existing_log(store, name) as log:
            if log is not None:
                verifications.append(verify(log)(anchors=anchors))
    return verifications


@contextmanager
def read_audit_log(store: str) -> Iterator[AuditReader | None]:
    """Query the audit log of a store; yields None while nothing was audited.

    Raises: Unavailable when the store can't be read.
    """
    with _existing_log(store, AUDIT_LOG) as log:
        yield None if log is None else AuditReader(log)


@contextmanager
def _existing_log(store: str, name: str) -> Iterator[EventLogReader | None]:
    try:
        log = open_store(store).existing_log(name)
    except NotFound:
        yield None
        return
    with closing(log):
        yield log


US_PER_MS = 1_000
LOCAL_LIFETIME_MS = 366 * DAY_MS
NO_EPOCH = (1 << 62) - 1
"""Epoch of tokens of local users, which no revocation of epochs reaches."""
Access = Callable[[Mailbox, Search], OpenSession]
"""Returns the function that opens the sessions of callers of a mailbox."""


def open_key_ring(store: str, path: str | None = None) -> KeyRing:
    """Return the root keys of a store.

    Arguments:
        path: path of the key file; None takes the path of a SQLite store with `.keys` appended, and memory
            for a store in memory.

    Raises: InvalidRequest for a store on a server without a path.
    """
    if path is not None:
        return FileKeyRing(os.path.abspath(check_path("The path of the key file", path)))
    if store == MEMORY:
        return MemoryKeyRing()
    if is_on_servers(store):
        raise InvalidRequest(
            "The path of the key file is missing, which a store on a server needs; name one, outside the "
            "store."
        )
    # Resolve the path: all names of a file have the same keys, and the working directory may change.
    return FileKeyRing(os.path.realpath(check_path("store", store)) + SUFFIX)


def check_keys(has_keys: object) -> None:
    """Raise InvalidRequest when there is no key."""
    if not has_keys:
        raise InvalidRequest(
            "There is no key to check capabilities with; create one with `postroom token rotate`, or let "
            "every process of this machine do everything with `serve --dev`."
        )


@contextmanager
def open_capabilities(store: str, keys: KeyRing | None = None) -> "Iterator[Capabilities]":
    """Open the log of the capabilities of a store, to issue and revoke them.

    Arguments:
        keys: keys of the store, needed only to issue capabilities and to rotate keys.

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


class CheckedAccess:
    """Access control of the callers of a mailbox, by their capabilities."""

    def __init__(self, authority: Authority, audit: AuditLog, settings: AccessSettings | None) -> None:
        self._authority = authority
        self._audit = audit
        self._settings = settings
        self._controls: WeakSet[AccessControl] = WeakSet()  # mailboxes of a runner come and go

    def __call__(self, mailbox: Mailbox, search: Search) -> OpenSession:
        """Return the function that opens sessions on a mailbox."""
        control = AccessControl(mailbox, search, self._authority, self._audit, SystemClock(), self._settings)
        self._controls.add(control)
        return control.open_session

    async def find_token(self, access_key: str) -> Token:
        """Return the token of the id of an access key; see `FindToken`."""
        token = read_access_key(access_key)
        key = await self._authority.find_key(token.read_identifier().key_id)
        return complete(token, key.secret)

    def set_quotas(self, settings: AccessSettings) -> None:
        """Apply other quotas of principals; see `AccessControl.set_quotas`."""
        for each in list(self._controls):
            each.set_quotas(settings)


@asynccontextmanager
async def open_access(
    store: str,
    *,
    key_file: str | None = None,
    settings: AccessSettings | None = None,
    audit: AuditSettings | None = None,
) -> AsyncIterator[CheckedAccess]:
    """Check the tokens of callers of mailboxes of a store for as long as the context lasts.

    Arguments:
        key_file: see `path` of `open_key_ring`.
        audit: settings of the audit log.

    Yields: access control, which opens the sessions of a mailbox's callers.
    Raises: InvalidRequest when there is no key, MissingExtra, Unavailable when keys, capabilities or the
        audit log can't be read.
    """
    keys = open_key_ring(store, key_file)
    async with AsyncExitStack() as opened:
        opening = open_capabilities(store, keys)
        capabilities = await asyncio.to_thread(opened.enter_context, opening)
        audit_log = await opened.enter_async_context(open_audit_log(open_store(store), audit))
        authority = await opened.enter_async_context(_open_authority(capabilities, keys, settings))

        yield CheckedAccess(authority, audit_log, settings)


@asynccontextmanager
async def open_local_access(
    store: str,
    mailbox: str,
    *,
    audit: AuditSettings | None = None,
    issued: KeyRing | None = None,
    settings: AccessSettings | None = None,
) -> AsyncIterator[tuple[CheckedAccess, str]]:
    """Let this process's user do everything, with a token that only this process knows; calls are audited.

    Arguments:
        issued: keys of the store, so that the capabilities that it issued are valid, too.

    Yields: access control, which opens the sessions of a mailbox's callers, and the token.
    Raises: Unavailable when the audit log can't be written, InvalidRequest for an unusable key file.
    """
    now = SystemClock().wall()
    key = RootKey(token_bytes(KEY_ID_BYTES), token_bytes(SECRET_BYTES), now)
    nonce, principal = token_bytes(NONCE_BYTES), f"local user {_user_name()}"
    issued_at = now // US_PER_MS
    identifier = Identifier(
        key_id=key.id,
        nonce=nonce,
        principal=principal,
        epoch=NO_EPOCH,
        issued_at=issued_at,
        rights=Rights(),
    )
    token = mint(identifier, key.secret, [Expires(issued_at + LOCAL_LIFETIME_MS)]).encode()
    async with AsyncExitStack() as opened:
        log = await opened.enter_async_context(open_audit_log(open_store(store), audit))
        revocations: RevocationLog = _NoRevocations()
        if issued is not None:
            revocations = opened.enter_context(open_capabilities(store, issued))
        keys = _LocalKeyRing(key, issued)
        authority = await opened.enter_async_context(_open_authority(revocations, keys, settings))
        session = AuditEntry(
            now, principal, nonce.hex(), Right.ADMIN, mailbox, (), "", 0, ALLOWED, "", ("session",)
        )
        await log.record([session])
        yield CheckedAccess(authority, log, settings), token


class _LocalKeyRing(MemoryKeyRing):
    """The keys of the store, with the key of this process's user."""

    def __init__(self, key: RootKey, issued: KeyRing | None) -> None:
        super().__init__()
        self.rotate(key, key.created_at)
        self._issued = issued

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys; see `KeyRing.root_keys`."""
        return [*super().root_keys(), *(() if self._issued is None else self._issued.root_keys())]


class _NoRevocations:
    """An empty list of revocations, for a token that ends with its process."""

    def read_revocations(self, revocations: Revocations) -> None:
        """Add nothing."""


def _user_name() -> str:
    """Return the name of the process's user, or its number if the system has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


@asynccontextmanager
async def open_access_control(
    mailbox: Mailbox,
    search: Search,
    capabilities: "Capabilities",
    keys: KeyRing,
    audit: AuditLog,
    settings: AccessSettings | None = None,
) -> AsyncIterator[AccessControl]:
    """Check the tokens of callers of a mailbox, with capabilities and an audit log that are open.

    Raises: as `open_access`.
    """
    async with _open_authority(capabilities, keys, settings) as authority:
        yield AccessControl(mailbox, search, authority, audit, SystemClock(), settings)


@asynccontextmanager
async def _open_authority(
    revocation_log: RevocationLog, keys: KeyRing, settings: AccessSettings | None
) -> AsyncIterator[Authority]:
    ttl_ms = (settings or AccessSettings()).validate().cap_cache_ttl_ms
    authority = Authority(keys, revocation_log, SystemClock(), ttl_ms)
    await authority.refresh()
    check_keys(authority.has_keys)
    async with background_task(authority.run()):
        yield authority
