"""`Authority`: the latest keys and revocations, which decide whether capabilities are valid."""

import asyncio
from collections.abc import Sequence

from postroom.application.access.key_ring import KeyRing
from postroom.application.access.revocations import RevocationLog, Revocations
from postroom.application.ports.event_log import Clock
from postroom.application.telemetry import logger
from postroom.domain.capability.access import Access, check_time, limit_to_key
from postroom.domain.capability.token import RootKey, not_issued_here
from postroom.domain.errors import PostroomError, Unauthenticated, Unavailable

POLL_MS = 1_000
"""Interval at which keys and revocations are read, and minimum time between two failed reads."""
US_PER_MS = 1_000
NEVER = -(1 << 62)


class Authority:
    """Keys and revocations, read at intervals by `run`, and by calls once they are older than `ttl_ms`.

    Arguments:
        ttl_ms: age up to which they count; if they can't be read for longer, no capability is valid.
    """

    def __init__(self, keys: KeyRing, revocation_log: RevocationLog, clock: Clock, ttl_ms: int) -> None:
        self._key_ring = keys
        self._revocation_log = revocation_log
        self._clock = clock
        self._ttl = ttl_ms * US_PER_MS
        self._keys: dict[bytes, RootKey] = {}
        self._revocations = Revocations()
        self._read_at = NEVER
        self._failure: tuple[int, PostroomError] | None = None
        self._reading = asyncio.Lock()

    @property
    def has_keys(self) -> bool:
        """Return whether there was a key when keys were read last."""
        return bool(self._keys)

    @property
    def is_stale(self) -> bool:
        """Return whether keys and revocations are too old to count."""
        return self._clock.uptime() - self._read_at >= self._ttl

    def expire(self) -> None:
        """Have keys and revocations read again by the next call."""
        self._read_at = NEVER

    def invalidity(self, access: Access) -> Unauthenticated | None:
        """Return the error if a capability is not valid now; None if it is."""
        try:
            # The key may have retired since the token was verified.
            check_time(limit_to_key(access, self._keys.get(access.key_id)), self._clock.wall() // US_PER_MS)
            self._revocations.check(access)
        except Unauthenticated as error:
            return error
        return None

    async def ensure_fresh(self) -> None:
        """Return when keys and revocations count.

        Raises: Unavailable when they can't be read.
        """
        if self.is_stale:
            await self._read_if_older(self._ttl)

    async def find_key(self, id_: bytes) -> RootKey:
        """Return a key, which another process may have created just now.

        Raises: Unauthenticated if the capability does not exist, Unavailable.
        """
        await self.ensure_fresh()
        if id_ not in self._keys:
            await self._read_if_older(POLL_MS * US_PER_MS)
        key = self._keys.get(id_)
        if key is None:
            raise not_issued_here()
        return key

    async def refresh(self) -> None:
        """Read keys and revocations now.

        Raises: Unavailable when they can't be read, InvalidRequest for a malformed key file.
        """
        async with self._reading:
            await self._read()

    async def run(self) -> None:
        """Read keys and revocations at intervals, until cancelled."""
        while True:
            await asyncio.sleep(POLL_MS / 1_000)
            try:
                await self.refresh()
            except PostroomError as error:
                logger().warning("access.refresh_failed", error=error.code)

    async def _read_if_older(self, age: int) -> None:
        """Read once for all calls that wait for it, and after a failure not for the next second."""
        async with self._reading:
            now = self._clock.uptime()
            if now - self._read_at < age:
                return
            if self._failure is not None and now - self._failure[0] < POLL_MS * US_PER_MS:
                raise _unverifiable(self._failure[1])
            try:
                await self._read()
            except PostroomError as error:
                raise _unverifiable(error) from error

    async def _read(self) -> None:
        started_at = self._clock.uptime()
        self._revocations.forget_expired(self._clock.wall() // US_PER_MS)
        try:
            keys = await asyncio.to_thread(self._read_blocking)
        except PostroomError as error:
            self._failure = (started_at, error)
            raise
        self._failure = None
        self._keys = {key.id: key for key in keys}
        self._read_at = started_at

    def _read_blocking(self) -> Sequence[RootKey]:
        self._revocation_log.read_revocations(self._revocations)
        return self._key_ring.root_keys()


def _unverifiable(error: PostroomError) -> Unavailable:
    return Unavailable(f"Whether the capability is valid can't be checked: {error}")
