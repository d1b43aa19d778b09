"""The ciphers of data subjects: AES-SIV (RFC 5297) for messages, HMAC-SHA256 for tokens."""

import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from postroom.application.ports.subject_keys import Part
from postroom.domain.errors import IntegrityFailure

CIPHER_BYTES = 64
"""A key of AES-256-SIV, which is two keys."""
DATA_KEY_BYTES = CIPHER_BYTES + 32
"""Data key: a key of AES-256-SIV, and one of HMAC."""
PSEUDONYM_PREFIX = "subject:"
TOKEN_PREFIX = "blind:"
TOKEN_BYTES = 16


class DataKey:
    """Data key of a subject; see `SubjectKey`.

    Arguments:
        key: `DATA_KEY_BYTES` random bytes.
    """

    def __init__(self, pseudonym: str, key: bytes) -> None:
        self._pseudonym = pseudonym
        self._cipher = AESSIV(key[:CIPHER_BYTES])
        self._hmac_key = key[CIPHER_BYTES:]

    def __repr__(self) -> str:
        return f"DataKey({self._pseudonym!r})"

    @property
    def pseudonym(self) -> str:
        """Return the pseudonym of the subject."""
        return self._pseudonym

    def encrypt(self, part: Part, plaintext: bytes) -> bytes:
        """Return a ciphertext, 16 bytes longer than the plaintext; see `SubjectKey.encrypt`."""
        # After a version: AES-SIV of libraries does not encrypt nothing.
        return self._cipher.encrypt(b"\x01" + plaintext, [part.encode()])

    def decrypt(self, part: Part, ciphertext: bytes) -> bytes:
        """Return the plaintext; see `SubjectKey.decrypt`."""
        try:
            plaintext = self._cipher.decrypt(ciphertext, [part.encode()])
        except (InvalidTag, ValueError):  # ValueError: too short
            plaintext = b""
        if plaintext[:1] != b"\x01":
            raise IntegrityFailure(f"The {part} of a message of {self._pseudonym} was altered.")
        return plaintext[1:]

    def token(self, name: str, value: bytes) -> str:
        """Return the token of a header's value; see `SubjectKey.token`."""
        text = name.encode()
        digest = hmac.digest(self._hmac_key, len(text).to_bytes(4, "big") + text + value, hashlib.sha256)
        return TOKEN_PREFIX + digest[:TOKEN_BYTES].hex()
