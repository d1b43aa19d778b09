"""Target: manifests of backups, which may come from any medium."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from postroom.application.backup.manifest import (
    FORMAT,
    ArchivedSegment,
    BackupFile,
    Manifest,
    decode_manifest,
    encode_manifest,
)
from postroom.application.ports.backup import MailboxHead
from postroom.domain.errors import IntegrityFailure, InvalidRequest
from tests.fuzz.target import Check

_HEAD = MailboxHead("acme@one", 1, 7, "00" * 32, 1, 1_700_000_000_000_000)
_FILE = BackupFile("store.db", 4_096, "ff" * 32)
_WHOLE = Manifest(FORMAT, "sqlite", 1_700_000_000_000_000, [_HEAD], [_FILE])
SEEDS = [
    encode_manifest(_WHOLE),
    encode_manifest(Manifest(FORMAT, "postgresql", 0, [], [], [ArchivedSegment("ü@one", 1, 2, "")])),
    encode_manifest(_WHOLE).replace(b'"format": 1', b'"format": 2'),
    encode_manifest(_WHOLE).replace(b"4096", b"1" * 40),
    encode_manifest(_WHOLE)[:-1],
]
BOMBS = [
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b'{"format": 1, "store": "' + b"\\u0000" * 100_000 + b'"}',
    b'{"format": ' + b"9" * 100_000 + b"}",
]


@contextmanager
def opened() -> Iterator[Check]:
    """Yield the check."""
    yield check


def check(data: bytes) -> None:
    """Check that a manifest is accepted only as it was written."""
    with suppress(IntegrityFailure, InvalidRequest):
        assert encode_manifest(decode_manifest(data, "backup")) == data
