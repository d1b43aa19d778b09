"""`AccessControl`: the one place where tokens are checked, for all surfaces (svc-mailbox I-8, I-15, C-6)."""

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from postroom.application.access.audit import AuditLog
from postroom.application.access.auditor import Auditor
from postroom.application.access.deliveries import Deliveries
from postroom.application.access.guard import Guard
from postroom.application.access.key_ring import KeyRing
from postroom.application.access.mailbox import AuthorizedMailbox
from postroom.application.access.quotas import Quotas
from postroom.application.access.revocations import RevocationLog, Revocations
from postroom.application.access.search import AuthorizedSearch
from postroom.application.access.settings import AccessSettings
from postroom.application.delivery_window import DeliveryWindows
from postroom.application.ports.clock import Clock
from postroom.application.ports.mailbox import Mailbox
from postroom.application.service import Search, Session
from postroom.application.telemetry import logger
from postroom.domain.capability.access import Access, limit_time, verify
from postroom.domain.capability.rights import Operation
from postroom.domain.capability.token import RootKey, Token, not_issued_here
from postroom.domain.errors import PostroomError, Unauthenticated, Unavailable

MAX_SESSIONS = 4_096
"""Number of verified tokens that are remembered; the oldest are forgotten first, and verified again."""
POLL_MS = 1_000
"""How often keys and revocations of other processes are read."""
SPIKE_REFUSALS = 100
"""Number of refusals within a second that is a spike, at which all tokens are verified again."""
SPIKE_PAUSE_MS = 5_000
"""Minimum time between two purges, so that whoever causes refusals can't keep the cache empty."""
US_PER_MS = 1_000


class _VerifiedToken(NamedTuple):
    session: Session
    guard: Guard
    until: int
    """When it is verified again, µs of the monotonic clock."""


class AccessControl:
    """Sessions of the bearers of capabilities on one mailbox.

    Only valid tokens are remembered, so junk takes no memory.

    Arguments:
        mailbox: permits everything.
        search: the same, of the read models of the mailbox's store.
        corr_id: returns the correlation id of the present call.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        search: Search,
        keys: KeyRing,
        revocation_log: RevocationLog,
        audit: AuditLog,
        clock: Clock,
        settings: AccessSettings | None = None,
        corr_id: Callable[[], str] = str,
    ) -> None:
        self._mailbox = mailbox
        self._search = search
        self._key_ring = keys
        self._revocation_log = revocation_log
        self._audit = audit
        self._clock = clock
        self._settings = (settings or AccessSettings()).validate()
        self._corr_id = corr_id
        self._ttl = self._settings.cap_cache_ttl_ms * US_PER_MS
        self._sessions: dict[str, _VerifiedToken] = {}
        self._keys: dict[bytes, RootKey] = {}
        self._revocations = Revocations()
        self._quotas = Quotas(self._settings, clock.uptime)
        self._deliveries = Deliveries()
        self._windows = DeliveryWindows()
        self._refreshed_at: int | None = None
        self._refreshing = asyncio.Lock()
        self._spike = _Spike(clock.uptime)

    async def open_session(self, token: str | None) -> Session:
        """Return what the bearer of a token may use.

        A token that has expired or was revoked opens a session as long as messages that it received are in
        flight, to settle them.

        Raises: Unauthenticated when there is no token or it is not valid, with the reason; Unavailable when
            keys and revocations can't be read.
        """
        if type(token) is not str or not token:
            raise Unauthenticated(
                "The call has no capability; send a token as `Authorization: Bearer TOKEN`.", "missing"
            )
        verified = self._sessions.get(token)
        if verified is None or verified.until <= self._clock.uptime():
            verified = await self._verify(token)
        guard = verified.guard
        if not self._deliveries.has_any(guard.access.nonce):
            await self._ensure_fresh()
            guard.check_validity()
        return verified.session

    async def run(self) -> None:
        """Read keys and revocations of other processes at intervals, until cancelled."""
        while True:
            await asyncio.sleep(POLL_MS / 1_000)
            try:
                await self.refresh()
            except PostroomError as error:  # calls fail once what was read is older than the time to live
                logger().warning("access.refresh_failed", error=error.code)

    async def refresh(self) -> None:
        """Read keys and revocations now.

        Raises: Unavailable when they can't be read, InvalidRequest for a malformed key file.
        """
        async with self._refreshing:
            started_at = self._clock.uptime()
            keys = await asyncio.to_thread(self._read)
            self._keys = {key.id: key for key in keys}
            self._revocations.forget_expired(self._clock.wall() // US_PER_MS)
            self._refreshed_at = started_at

    def _read(self) -> Sequence[RootKey]:
        self._revocation_log.read_revocations(self._revocations)
        return self._key_ring.root_keys()

    async def _verify(self, text: str) -> _VerifiedToken:
        self._sessions.pop(text, None)
        try:
            token = Token.decode(text)
            key = await self._find_key(token.read_identifier().key_id)
            access = verify(token, key.secret)
        except Unauthenticated:
            self._count_refusal()
            raise
        if key.retire_at is not None:
            access = limit_time(access, key.retire_at // US_PER_MS)
        verified = self._open(access)
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[text] = verified
        return verified

    async def _find_key(self, id_: bytes) -> RootKey:
        await self._ensure_fresh()
        key = self._keys.get(id_)
        if key is None and self._age() > POLL_MS * US_PER_MS:  # another process may have rotated just now
            await self.refresh()
            key = self._keys.get(id_)
        if key is None:
            raise not_issued_here()
        return key

    def _open(self, access: Access) -> _VerifiedToken:
        guard = Guard(
            access,
            self._mailbox.name,
            self._revocations,
            self._quotas,
            self._clock,
            self._ensure_fresh,
            self._count_refusal,
        )
        auditor = Auditor(self._audit, access, self._mailbox.name, self._clock.wall, self._corr_id)
        mailbox = AuthorizedMailbox(
            self._mailbox, guard, auditor, self._deliveries, self._windows, self._clock.wall
        )

        def require(operation: Operation) -> None:
            guard.check_validity()
            guard.check_operation(operation)
            guard.check_all_topics()
            guard.charge()

        session = Session(mailbox, AuthorizedSearch(self._search, guard, auditor), require)
        return _VerifiedToken(session, guard, self._clock.uptime() + self._ttl)

    def _age(self) -> int:
        """Return how old the keys and revocations are, in µs; more than any limit before they are read."""
        refreshed_at = self._refreshed_at
        return 1 << 62 if refreshed_at is None else self._clock.uptime() - refreshed_at

    async def _ensure_fresh(self) -> None:
        """Return when keys and revocations are not older than the time to live of the cache."""
        if self._age() < self._ttl:
            return
        try:
            await self.refresh()
        except Unavailable as error:
            raise Unavailable(
                f"Whether the capability was revoked can't be checked: {error}", error.retry_after_ms
            ) from error

    def _count_refusal(self) -> None:
        if self._spike.count():
            self._sessions.clear()
            self._refreshed_at = None
            logger().warning("access.refusals_spiked", purged=True)


class _Spike:
    """Detector of many refusals in a short time."""

    def __init__(self, uptime: Callable[[], int]) -> None:
        self._uptime = uptime
        self._second = 0
        self._count = 0
        self._purged_at: int | None = None

    def count(self) -> bool:
        """Count a refusal; return whether it is time to purge."""
        now = self._uptime()
        if now // 1_000_000 != self._second:
            self._second, self._count = now // 1_000_000, 0
        self._count += 1
        if self._count < SPIKE_REFUSALS:
            return False
        if self._purged_at is not None and now - self._purged_at < SPIKE_PAUSE_MS * US_PER_MS:
            return False
        self._purged_at = now
        return True
