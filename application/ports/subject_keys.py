"""Ports: the keys with which the messages of data subjects are encrypted, and the key that wraps them."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol

from postroom.domain.errors import NotFound

Part = Literal["payload", "headers", "result", "traceback"]
"""Part of a message; a ciphertext of one can't take the place of another."""


class SubjectKey(Protocol):
    """Data key of one subject."""

    @property
    def pseudonym(self) -> str:
        """Return the random name that stands for the subject in stored messages."""

    def encrypt(self, part: Part, plaintext: bytes) -> bytes:
        """Return a ciphertext, which is the same for the same arguments."""

    def decrypt(self, part: Part, ciphertext: bytes) -> bytes:
        """Return the plaintext; raise IntegrityFailure for a ciphertext that `encrypt` did not return."""

    def token(self, name: str, value: bytes) -> str:
        """Return the token of a header's value, so that equal values of the subject can be searched.

        Arguments:
            name: of the header; equal values of two headers have different tokens.
        """


class Subject(NamedTuple):
    """A subject that has, or had, a key.

    Arguments:
        created_at: µs since 1970 UTC.
        erased_at: when its key was destroyed, µs since 1970 UTC, or None.
        is_recorded: whether the erasure was completed and recorded.
    """

    pseudonym: str
    created_at: int
    erased_at: int | None = None
    is_recorded: bool = False


class SubjectKeys(Protocol):
    """Store of the data keys, apart from the log; every adapter passes `tests/conformance/subject_keys.py`.

    It contains data keys and names of subjects, but none of them in the clear. Calls block and may come from
    any thread. Nothing is cached: a key that any process has destroyed is in use by none.

    All methods raise Unavailable when the keys can't be read or written, and InvalidRequest when another
    master key wraps them.
    """

    def get_or_create(self, subjects: Collection[str]) -> Mapping[str, SubjectKey]:
        """Return the keys of subjects by their names; new ones are durable when this returns."""

    def get(self, subjects: Collection[str]) -> Mapping[str, SubjectKey]:
        """Return the keys of those subjects, by name, that have one."""

    def resolve(self, pseudonyms: Collection[str]) -> Mapping[str, SubjectKey | None]:
        """Return the keys by pseudonym; None for those that were destroyed.

        Raises: UnknownPseudonym for one that this store never created.
        """

    def find(self, subject: str) -> Subject | None:
        """Return a subject that has a key, or whose erasure is not recorded yet, or None."""

    def list_subjects(self) -> Sequence[Subject]:
        """Return all subjects in the order of their creation."""

    def destroy(self, pseudonym: str, now: int) -> None:
        """Destroy the key and the name of a subject durably; what remains is that it was erased.

        `find` returns the subject until `mark_recorded`, so that an interrupted erasure can be resumed.
        Repeating it changes nothing.

        Arguments:
            now: µs since 1970 UTC.

        Raises: UnknownPseudonym.
        """

    def mark_recorded(self, pseudonym: str) -> None:
        """Complete an erasure: nothing leads from the subject's name to its pseudonym any more."""


class UnknownPseudonym(NotFound):
    """A message has the pseudonym of a subject that the key store never had."""

    def __init__(self, pseudonym: str, where: str) -> None:
        super().__init__(
            f"{where} has no key for {pseudonym}, and none was destroyed; use the key store with which the "
            "message was sent."
        )


class MasterKey(Protocol):
    """Key that wraps the data keys; an adapter may leave it in a key management service."""

    @property
    def key_id(self) -> str:
        """Return the id of the key in errors and in the key store."""

    def wrap(self, data_key: bytes, pseudonym: str) -> bytes:
        """Return a data key encrypted and bound to its pseudonym."""

    def unwrap(self, data_key: bytes, pseudonym: str) -> bytes:
        """Return the data key that `wrap` encrypted.

        Raises: IntegrityFailure when it was altered or is of another pseudonym.
        """

    def index(self, subject: str) -> bytes:
        """Return the blind index of a subject's name: 32 bytes that do not reveal it."""

    def sign(self, record: bytes) -> bytes:
        """Return an Ed25519 signature, 64 bytes."""

    def verify(self, record: bytes, signature: bytes) -> bool:
        """Return whether `sign` returned this signature of a record."""

    @property
    def public_key(self) -> bytes:
        """Return the public key that verifies `sign`, 32 bytes."""


class ErasureLog(Protocol):
    """Lines of text, beside the key store; calls block.

    All methods raise Unavailable when the lines can't be read or written.
    """

    def read(self) -> Sequence[bytes]:
        """Return the lines, oldest first; none before the first `append`."""

    def locked(self) -> AbstractContextManager[None]:
        """Keep other writers out while the context lasts; raises Unavailable when there is one."""

    def append(self, line: bytes) -> None:
        """Append a line, which is durable when this returns; the caller holds the lock."""
