"""Revocations, as every process that checks capabilities applies them."""

from typing import Protocol

from postroom.domain.capability.access import Access
from postroom.domain.errors import Unauthenticated
from postroom.domain.policy import DAY_MS

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
        """Forget what expired a day before `now`, ms since 1970 UTC; before the revocations are read."""
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
        """Add what was revoked after `revocations.position`.

        Raises: Unavailable when the log can't be read.
        """
