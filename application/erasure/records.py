"""Records of erasures: signed, and chained by hashes."""

from collections.abc import Iterator, Sequence

import msgspec
from blake3 import blake3

from postroom.application.ports.subject_keys import MasterKey
from postroom.domain.errors import IntegrityFailure

GENESIS = "0" * 64
"""Hash before the first record."""


class LogEnd(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """End of a log: the position and the chain hash, in hex, of its last commit."""

    log: str
    position: int
    chain: str


class SubjectMessages(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number of messages of a subject in a topic, by their status."""

    mailbox: str
    topic: str
    status: str
    messages: int


class ErasureRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A completed erasure.

    Arguments:
        store: where the messages are.
        erased_at: when the key was destroyed, µs since 1970 UTC.
        recorded_at: µs since 1970 UTC.
        messages: of the subject, in the logs and archives of the store, after the erasure.
        removed: number of ready messages and dead letters that were removed.
        logs: ends of the logs of the store after that.
        previous: BLAKE3 hash of the line before, in hex; `GENESIS` in the first.
        public_key: Ed25519 key that verifies the signature.
        signature: of the record without it.
    """

    pseudonym: str
    store: str
    erased_at: int
    recorded_at: int
    messages: list[SubjectMessages]
    removed: int
    logs: list[LogEnd]
    previous: str
    public_key: str
    signature: str = ""

    def sign(self, master_key: MasterKey) -> "ErasureRecord":
        """Return the record with a signature."""
        return msgspec.structs.replace(self, signature=master_key.sign(self._signed_bytes()).hex())

    def is_signed_by(self, master_key: MasterKey) -> bool:
        """Return whether the master key signed the record."""
        try:
            signature = bytes.fromhex(self.signature)
        except ValueError:
            return False
        is_own = self.public_key == master_key.public_key.hex()
        return is_own and master_key.verify(self._signed_bytes(), signature)

    def encode(self) -> bytes:
        """Return the record as JSON without line breaks."""
        return _encode(self)

    def _signed_bytes(self) -> bytes:
        return _encode(msgspec.structs.replace(self, signature=""))


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(ErasureRecord).decode


def hash_of(line: bytes) -> str:
    """Return the hash by which the next record refers to a line."""
    return blake3(line).hexdigest()


def read_records(lines: Sequence[bytes], master_key: MasterKey) -> Iterator[ErasureRecord]:
    """Yield the records of an erasure log after checking their signatures and that none is missing between.

    Raises: IntegrityFailure naming the first line that was altered, removed or signed by another master key.
    """
    previous = GENESIS
    for number, line in enumerate(lines, 1):
        try:
            record = _decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            record = None
        if record is None or record.encode() != line or not record.is_signed_by(master_key):
            raise IntegrityFailure(
                f"Line {number} of the erasure log was altered, or is not signed by the master key "
                f"{master_key.key_id}; restore the file from a backup."
            )
        if record.previous != previous:
            raise IntegrityFailure(
                f"Lines before line {number} of the erasure log were removed or replaced; restore the file "
                "from a backup."
            )
        previous = hash_of(line)
        yield record
