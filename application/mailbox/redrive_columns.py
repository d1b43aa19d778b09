"""Runs of the events of redrive jobs."""

from postroom.application.mailbox.columns import Ints, OptionalTexts, Run, Texts
from postroom.domain.redrive.job import (
    RedriveAdvanced,
    RedriveCancelled,
    RedriveCompleted,
    RedrivePaused,
    RedriveResumed,
    RedriveSkipped,
    RedriveStarted,
    RedriveUndoAdvanced,
    RedriveUndone,
    RedriveUndoStarted,
)
from postroom.domain.redrive.spec import RedriveSpec


class RedriveStartedRun(Run, frozen=True, tag="RedriveStarted.1"):
    """Redrive jobs that were started."""

    event = RedriveStarted

    specs: RedriveSpec | list[RedriveSpec]
    cutoffs: Ints
    matched: Ints
    operators: OptionalTexts


class RedriveAdvancedRun(Run, frozen=True, tag="RedriveAdvanced.1"):
    """Progress of redrive jobs."""

    event = RedriveAdvanced

    cursors: Ints
    moved: Ints
    skipped: Ints


class RedriveSkippedRun(Run, frozen=True, tag="RedriveSkipped.1"):
    """Messages that redrive jobs left as they are."""

    event = RedriveSkipped

    messages: bytes | list[bytes]
    reasons: Texts


class RedrivePausedRun(Run, frozen=True, tag="RedrivePaused.1"):
    """Redrive jobs that operators paused."""

    event = RedrivePaused

    operators: OptionalTexts


class RedriveResumedRun(Run, frozen=True, tag="RedriveResumed.1"):
    """Redrive jobs that operators resumed."""

    event = RedriveResumed

    operators: OptionalTexts


class RedriveCancelledRun(Run, frozen=True, tag="RedriveCancelled.1"):
    """Redrive jobs that operators cancelled."""

    event = RedriveCancelled

    operators: OptionalTexts


class RedriveCompletedRun(Run, frozen=True, tag="RedriveCompleted.1"):
    """Redrive jobs that are done."""

    event = RedriveCompleted


class RedriveUndoStartedRun(Run, frozen=True, tag="RedriveUndoStarted.1"):
    """Redrive jobs that operators had undone."""

    event = RedriveUndoStarted

    operators: OptionalTexts


class RedriveUndoAdvancedRun(Run, frozen=True, tag="RedriveUndoAdvanced.1"):
    """Progress of undoing redrive jobs."""

    event = RedriveUndoAdvanced

    cursors: Ints
    restored: Ints
    retained: Ints


class RedriveUndoneRun(Run, frozen=True, tag="RedriveUndone.1"):
    """Redrive jobs that are undone."""

    event = RedriveUndone


RedriveRun = (
    RedriveStartedRun
    | RedriveAdvancedRun
    | RedriveSkippedRun
    | RedrivePausedRun
    | RedriveResumedRun
    | RedriveCancelledRun
    | RedriveCompletedRun
    | RedriveUndoStartedRun
    | RedriveUndoAdvancedRun
    | RedriveUndoneRun
)
