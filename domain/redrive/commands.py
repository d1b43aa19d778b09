"""Commands of redrive jobs; which messages match is a fact that their owner reads from the log."""

import msgspec

from postroom.domain.message import DeadReason, Headers
from postroom.domain.redrive.spec import JobAction, RedriveSpec, SkipReason


class StartRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to start a job; one that exists with the same specification is left as it is.

    Arguments:
        job: its id, 16 bytes.
        cutoff, matched, principal: as of `RedriveStarted`.
    """

    job: bytes
    spec: RedriveSpec
    cutoff: int
    matched: int
    principal: str | None = None


class AdvanceRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to change the next messages of a job; those that are no longer selected are skipped.

    Arguments:
        messages: streams of dead letters that match, in the order of their dead-letterings.
        copies: for a job that sends copies, the copy of each message, or the reason why it was skipped.
        cursor: as of `RedriveAdvanced`, if all of them can be changed.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[bytes, ...]
    cursor: int
    is_last: bool
    copies: tuple["Copy | SkipReason", ...] = ()


class Copy(msgspec.Struct, frozen=True, gc=False):
    """A message to be sent in the place of a dead letter; the fields of `MessageSent`.

    Arguments:
        message: its stream id, 16 bytes.
        ttl_ms: age at which it is dead-lettered if undelivered; None uses the topic's retention.
    """

    message: bytes
    topic: str
    size: int
    payload_hash: bytes
    hash_chain: bytes
    headers: Headers
    envelope: bytes
    priority: int
    ttl_ms: int | None


class ChangeRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to pause, resume, cancel or undo a job."""

    job: bytes
    action: JobAction
    principal: str | None = None


class UndoRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to make messages of a job dead letters again, if nothing happened to them since.

    Arguments:
        messages: streams of the messages that the job redrove, or of the copies that it sent, each with the
            position of the event by which it did.
        originals: of these, for each copy.
        cursor: version of the job's event that came with them.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[tuple[bytes, int], ...]
    cursor: int
    is_last: bool
    originals: tuple["Original", ...] = ()


class Original(msgspec.Struct, frozen=True, gc=False):
    """A dead letter of which a job sent a copy.

    Arguments:
        stream: its id, 16 bytes.
        position: of its event in the commit that sent the copy.
        reason: why it was dead-lettered before.
    """

    stream: bytes
    position: int
    reason: DeadReason


RedriveCommand = StartRedrive | AdvanceRedrive | ChangeRedrive | UndoRedrive
