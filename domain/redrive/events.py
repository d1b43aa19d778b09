"""Events of redrive jobs; their stream is the job's id."""

from postroom.domain.event import Event
from postroom.domain.redrive.spec import RedriveSpec, SkipReason


class RedriveStarted(Event, frozen=True, gc=False):
    """An operator started a redrive job.

    Arguments:
        cutoff: position of the log up to which messages must have been dead-lettered to be selected.
        matched: number of the dead letters that matched.
        principal: who started it; None for a caller without a capability.
    """

    spec: RedriveSpec
    cutoff: int
    matched: int
    principal: str | None


class RedriveAdvanced(Event, frozen=True, gc=False):
    """The job changed messages, by the events before this one in its commit.

    Arguments:
        cursor: dead-letterings up to this position are done with.
        moved: number of messages that were changed: as many events precede this one. Of a job that sends
            copies, those are the originals' dead-letterings, and as many before them send the copies.
        skipped: number of messages that were not, as they are no longer the dead letters that were selected.
    """

    cursor: int
    moved: int
    skipped: int


class RedriveSkipped(Event, frozen=True, gc=False):
    """The job left a message as it is; in the commit of its progress, which counts it.

    Arguments:
        message: its stream.
    """

    message: bytes
    reason: SkipReason


class RedrivePaused(Event, frozen=True, gc=False):
    """An operator paused the job."""

    principal: str | None


class RedriveResumed(Event, frozen=True, gc=False):
    """An operator resumed the job."""

    principal: str | None


class RedriveCancelled(Event, frozen=True, gc=False):
    """An operator cancelled the job; what it did stays done."""

    principal: str | None


class RedriveCompleted(Event, frozen=True, gc=False):
    """The job is done with all that it selected."""


class RedriveUndoStarted(Event, frozen=True, gc=False):
    """An operator had the job undone, as far as nobody received its messages."""

    principal: str | None


class RedriveUndoAdvanced(Event, frozen=True, gc=False):
    """Messages of the job are dead letters again, by the events before this one in its commit.

    Arguments:
        cursor: the job's events up to this version are undone.
        restored: number of messages that are dead letters again: as many events precede this one. Of a job
            that sent copies, as many before them remove the copies.
        retained: number of messages that were received, or removed, since.
    """

    cursor: int
    restored: int
    retained: int


class RedriveUndone(Event, frozen=True, gc=False):
    """All messages of the job that nobody received are dead letters again."""


RedriveEvent = (
    RedriveStarted
    | RedriveAdvanced
    | RedriveSkipped
    | RedrivePaused
    | RedriveResumed
    | RedriveCancelled
    | RedriveCompleted
    | RedriveUndoStarted
    | RedriveUndoAdvanced
    | RedriveUndone
)
