"""`AccessControl`: the one place where tokens are checked, for all surfaces (svc-mailbox I-8, I-15, C-6)."""

from collections.abc import Callable
from typing import NamedTuple

from postroom.application.access.audit import AuditLog, Auditor
from postroom.application.access.authority import Authority
from postroom.application.access.guard import AccessSettings, Deliveries, Guard, Quotas
from postroom.application.access.mailbox import AuthorizedMailbox
from postroom.application.access.search import AuthorizedSearch, AuthorizedSearchQueries
from postroom.application.mailbox.settle import DeliveryWindows
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.event_log import Clock
from postroom.application.ports.read_models import SearchQueries
from postroom.application.service import Grant, Search, Session
from postroom.application.telemetry import logger
from postroom.domain.capability.access import Access, limit_to_key, verify
from postroom.domain.capability.rights import Right
from postroom.domain.capability.token import Token
from postroom.domain.errors import Unauthenticated

MAX_SESSIONS = 4_096
"""Size of the verification cache; the oldest tokens are evicted first."""
SPIKE_REFUSALS = 100
"""Number of refusals within a second that empties the verification cache."""
SPIKE_PAUSE_MS = 5_000
"""Minimum time between two purges, so that refusals can't keep the cache empty."""
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
        mailbox: the mailbox, which permits everything.
        search: search of the store's read models, which permits everything.
        authority: keys and revocations, kept up to date.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        search: Search,
        authority: Authority,
        audit: AuditLog,
        clock: Clock,
        settings: AccessSettings | None = None,
    ) -> None:
        self._mailbox = mailbox
        self._search = search
        self._audit = audit
        self._clock = clock
        self._settings = (settings or AccessSettings()).validate()
        self._ttl = self._settings.cap_cache_ttl_ms * US_PER_MS
        self._authority = authority
        self._sessions: dict[str, _VerifiedToken] = {}
        self._quotas = Quotas(self._settings, clock.uptime)
        self._deliveries = Deliveries()
        self._windows = DeliveryWindows()
        self._spike = _Spike(clock.uptime)

    async def open_session(self, token: str | None) -> Session:
        """Return the session of the bearer of a token.

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
            await self._authority.ensure_fresh()
            guard.check_validity()
        return verified.session

    def set_quotas(self, settings: AccessSettings) -> None:
        """Replace the quotas of principals, from the next session of each token on.

        Raises: InvalidRequest for settings out of bounds; nothing is changed.
        """
        self._quotas.reconfigure(settings.validate())
        self._sessions.clear()

    async def refresh(self) -> None:
        """Read keys and revocations now; see `Authority.refresh`."""
        await self._authority.refresh()

    async def _verify(self, text: str) -> _VerifiedToken:
        self._sessions.pop(text, None)
        try:
            token = Token.decode(text)
            key = await self._authority.find_key(token.read_identifier().key_id)
            access = limit_to_key(verify(token, key.secret), key)
        except Unauthenticated:
            self._count_refusal()
            raise
        verified = self._open(access)
        if len(self._sessions) >= MAX_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[text] = verified
        return verified

    def _open(self, access: Access) -> _VerifiedToken:
        guard = Guard(
            access,
            self._mailbox.name,
            self._authority,
            self._quotas,
            self._count_refusal,
        )
        auditor = Auditor(self._audit, access, self._mailbox.name, self._clock.wall)
        search = AuthorizedSearch(self._search, guard, auditor)
        mailbox = AuthorizedMailbox(
            self._mailbox, guard, auditor, self._deliveries, self._windows, self._clock.wall, search
        )

        def require(operation: Right) -> None:
            guard.check_validity()
            guard.check_operation(operation)
            guard.check_all_topics()
            guard.charge()

        async def check(operation: Right) -> None:
            await guard.check(operation)
            guard.charge()

        grant = Grant(
            access.principal,
            guard.operations,
            access.expires,
            guard.covers_all_topics,
            guard.covers,
            check,
            access,
        )

        def search_queries(queries: SearchQueries) -> SearchQueries:
            return AuthorizedSearchQueries(queries, guard, auditor)

        session = Session(
            mailbox, search, require, mailbox.read_headers, grant, auditor.run, search_queries, mailbox.caller
        )
        return _VerifiedToken(session, guard, self._clock.uptime() + self._ttl)

    def _count_refusal(self) -> None:
        if self._spike.count():
            self._sessions.clear()
            self._authority.expire()
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
