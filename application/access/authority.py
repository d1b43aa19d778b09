"""The latest keys and revocations, which decide whether capabilities are valid."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from postroom.application.ports.event_log import Clock
from postroom.application.telemetry import logger
from postroom.domain.capability.access import Access, check_time, limit_to_key
from postroom.domain.capability.token import RootKey, not_issued_here
from postroom.domain.errors import PostroomError, Unauthenticated, Unavailable
from postroom.domain.policy import DAY_MS


class KeyRing(Protocol):
    """The root keys of a service; every adapter passes `tests/conformance/key_ring.py`.

    Calls block and may come from any thread. Secrets are in no event, log, error or `repr`.
    """

    def root_keys(self) -> Sequence[RootKey]:
        """Return the keys, oldest first; none before the first `rotate`.

        Raises: InvalidRequest when they are malformed or others may read them, Unavailable when they can't be
            read.
        """

    def rotate(self, key: RootKey, retire_at: int) -> None:
        """Add the key that signs from now on; it is durable when this returns.

        Arguments:
            retire_at: tokens signed by the other keys are valid until then, unless the keys retire earlier;
                µs since 1970 UTC. Keys that were retired when `key` was created are removed.

        Raises: as `root_keys`.
        """


def signing_key(keys: Iterable[RootKey]) -> RootKey | None:
    """Return the key that signs, which is the newest, or None if the ring is empty."""
    return max(keys, key=lambda key: key.created_at, default=None)


def rotate_keys(keys: Sequence[RootKey], key: RootKey, retire_at: int) -> list[RootKey]:
    """Return the keys after a rotation; see `KeyRing.rotate`."""
    key.validate()
    others = [
        RootKey(
            each.id,
            each.secret,
            each.created_at,
            retire_at if each.retire_at is None else min(each.retire_at, retire_at),
        )
        for each in keys
        if each.retire_at is None or each.retire_at > key.created_at
    ]
    return [*others, key]


FORGET_AFTER_MS = DAY_MS
"""Time for which a revocation outlasts the capability's expiry, as the wall clock may be set back."""


class Revocations:
    """The capabilities that are revoked: nonces, and all below an epoch.

    A nonce is forgotten a day after the capability has expired, so there are not many more than live ones.
    """

    def __init__(self) -> None:
        self.position = 0
        """Position in the log of capabilities up to which revocations were read."""
        self._nonces: dict[bytes, int] = {}
        self._epoch = 0
        self._forgotten_at = 0

    def add_nonce(self, nonce: bytes, expires: int) -> None:
        """Revoke a capability, which expires at `expires`, ms since 1970 UTC."""
        self._nonces[nonce] = expires

    def add_epoch(self, epoch: int) -> None:
        """Revoke the capabilities of this epoch and of those before it."""
        self._epoch = max(self._epoch, epoch + 1)

    def forget_expired(self, now: int) -> None:
        """Forget what expired a day before `now`, ms since 1970 UTC; call it before reading revocations."""
        if now < self._forgotten_at:  # the clock was set back, so what was forgotten may be valid again
            self.position, self._forgotten_at = 0, 0
        since = now - FORGET_AFTER_MS
        live = {nonce: expires for nonce, expires in self._nonces.items() if expires > since}
        if len(live) < len(self._nonces):
            self._nonces, self._forgotten_at = live, now

    def check(self, access: Access) -> None:
        """Raise Unauthenticated if a capability is revoked."""
        if access.nonce in self._nonces or access.epoch < self._epoch:
            raise Unauthenticated("The capability was revoked; get a new one.", "revoked")


class RevocationLog(Protocol):
    """Port: where revocations are recorded; calls block."""

    def read_revocations(self, revocations: Revocations) -> None:
        """Add the revocations after `revocations.position`.

        Raises: Unavailable when the log can't be read.
        """


POLL_MS = 1_000
"""Interval at which keys and revocations are read, and minimum time between two failed reads."""
UNUSED_POLLS = 5
"""Number of intervals without a call after which they are not read until the next call."""
US_PER_MS = 1_000
NEVER = -(1 << 62)


class Authority:
    """Keys and revocations, read at intervals by `run`, and by calls once they are older than `ttl_ms`.

    Arguments:
        ttl_ms: age up to which they are used; if they can't be read for longer, no capability is valid.
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
        self._used = asyncio.Event()

    @property
    def has_keys(self) -> bool:
        """Return whether there was a key when keys were read last."""
        return bool(self._keys)

    @property
    def is_stale(self) -> bool:
        """Return whether keys and revocations are too old to be used."""
        self._used.set()
        return self._clock.uptime() - self._read_at >= self._ttl

    def expire(self) -> None:
        """Have keys and revocations read again by the next call."""
        self._read_at = NEVER

    def invalidity(self, access: Access) -> Unauthenticated | None:
        """Return the error if a capability is not valid now; None if it is."""
        self._used.set()
        try:
            # The key may have retired since the token was verified.
            check_time(limit_to_key(access, self._keys.get(access.key_id)), self._clock.wall() // US_PER_MS)
            self._revocations.check(access)
        except Unauthenticated as error:
            return error
        return None

    async def ensure_fresh(self) -> None:
        """Wait until keys and revocations are recent enough to be used.

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
        """Read keys and revocations at intervals while there are calls, until cancelled."""
        unused = 0
        while True:
            self._used.clear()
            await asyncio.sleep(POLL_MS / 1_000)
            unused = 0 if self._used.is_set() else unused + 1
            if unused >= UNUSED_POLLS:
                self.expire()
                await self._used.wait()  # by a call that reads them
                unused = 0
                continue
            try:
                await self.refresh()
            except PostroomError as error:
                logger().retry("access.refresh_failed", error=error.code)

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
