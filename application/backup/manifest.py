"""Manifest of a backup: what it contains, and the hashes that prove it."""

import msgspec
from blake3 import blake3

from postroom.application.ports.backup import MailboxHead
from postroom.domain.errors import IntegrityFailure, InvalidRequest

FORMAT = 1
_encode = msgspec.json.Encoder().encode


class BackupFile(msgspec.Struct, frozen=True):
    """A file of a backup, with its size in bytes and the BLAKE3 hash of its content in hex."""

    name: str
    bytes: int
    blake3: str


class ArchivedSegment(msgspec.Struct, frozen=True):
    """A segment of the log archive, which the backup names and does not copy; `chain` in hex."""

    mailbox: str
    first: int
    last: int
    chain: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a backup.

    Arguments:
        format: version of the backup's format.
        store: kind of the store that was backed up, `sqlite` or `postgresql`.
        created_at: when the backup was started, µs since 1970 UTC.
        checksum: BLAKE3 of the manifest without this field, in hex.
    """

    format: int
    store: str
    created_at: int
    mailboxes: list[MailboxHead]
    files: list[BackupFile]
    archive: list[ArchivedSegment] = []
    checksum: str = ""

    @property
    def records(self) -> int:
        """Return the number of events in the backup."""
        return sum(each.position - each.first + 1 for each in self.mailboxes if each.first)

    @property
    def bytes(self) -> int:
        """Return the size of the backup's files."""
        return sum(file.bytes for file in self.files)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return a manifest as indented JSON, with its checksum."""
    signed = msgspec.structs.replace(manifest, checksum=_checksum(manifest))
    return msgspec.json.format(_encode(signed)) + b"\n"


def decode_manifest(text: bytes, where: str) -> Manifest:
    """Parse a manifest that `encode_manifest` wrote, and verify its checksum.

    Arguments:
        where: the backup, for messages.

    Raises: IntegrityFailure when it was altered, InvalidRequest when it has a later format.
    """
    try:
        version = msgspec.json.decode(text, type=_Version).format
        if version > FORMAT:
            raise InvalidRequest(
                f"The backup {where} has format {version}, and this version of Postroom reads up to "
                f"{FORMAT}; install the version that wrote it, or a later one."
            )
        manifest = msgspec.json.decode(text, type=Manifest)
        is_intact = encode_manifest(manifest) == text  # its checksum and every other byte
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise _altered_manifest(where) from error
    if not is_intact:
        raise _altered_manifest(where)
    return manifest


class _Version(msgspec.Struct):
    format: int


def _checksum(manifest: Manifest) -> str:
    return blake3(_encode(msgspec.structs.replace(manifest, checksum=""))).hexdigest()


def _altered_manifest(where: str) -> IntegrityFailure:
    return IntegrityFailure(f"The manifest of the backup {where} was altered; use another backup.")
