"""Commands of redrive jobs; which messages match is a fact that their owner reads from the log."""

import msgspec

from postroom.domain.redrive.spec import JobAction, RedriveSpec


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
        cursor: as of `RedriveAdvanced`, if all of them can be changed.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[bytes, ...]
    cursor: int
    is_last: bool


class ChangeRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to pause, resume, cancel or undo a job."""

    job: bytes
    action: JobAction
    principal: str | None = None


class UndoRedrive(msgspec.Struct, frozen=True, gc=False):
    """Command to make messages of a job dead letters again, if nothing happened to them since.

    Arguments:
        messages: streams, and the positions of the events by which the job redrove them.
        cursor: version of the job's event that came with them.
        is_last: whether none is left after them.
    """

    job: bytes
    messages: tuple[tuple[bytes, int], ...]
    cursor: int
    is_last: bool


RedriveCommand = StartRedrive | AdvanceRedrive | ChangeRedrive | UndoRedrive
