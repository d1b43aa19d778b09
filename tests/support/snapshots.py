"""Whole snapshots of mailboxes: to compare states, and to put into a log."""

from postroom.application.mailbox.snapshots import chunks_through
from postroom.application.mailbox.stored_snapshots import decode_part, encode_part
from postroom.domain.mailbox.snapshot import EVER, VERSION, Head, SnapshotPart, encode_chunk, restore_snapshot
from postroom.domain.mailbox.state import Mailbox


def take_snapshot(mailbox: Mailbox) -> bytes:
    """Return a snapshot of a mailbox in one part; equal states have equal bytes."""
    chunks = [encode_chunk(chunk) for chunk in chunks_through(mailbox, EVER) if chunk.items]
    return encode_part(SnapshotPart(VERSION, 0, b"", Head.of(mailbox), chunks))


def restore(state: bytes, name: str) -> Mailbox | None:
    """Return the mailbox of a snapshot in one part, or None if it can't be read."""
    part = decode_part(state)
    return None if part is None else restore_snapshot([part], name)
