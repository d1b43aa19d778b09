"""Runs of the events of redrive jobs, subscriptions and schedules."""

from postroom.domain.commit import Ints, OptionalBytes, OptionalTexts, Run, Texts
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
from postroom.domain.schedule import (
    ScheduleDeleted,
    SchedulePaused,
    ScheduleRan,
    ScheduleResumed,
    ScheduleSet,
    ScheduleSpec,
)
from postroom.domain.subscription import (
    SubscriptionAdvanced,
    SubscriptionDeleted,
    SubscriptionFilter,
    SubscriptionRewound,
    SubscriptionSet,
)


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


class SubscriptionSetRun(Run, frozen=True, tag="SubscriptionSet.1"):
    """Subscriptions that operators created or changed."""

    event = SubscriptionSet

    subscriptions: Texts
    filters: SubscriptionFilter | list[SubscriptionFilter]
    positions: Ints
    operators: OptionalTexts


class SubscriptionRewoundRun(Run, frozen=True, tag="SubscriptionRewound.1"):
    """Subscriptions that operators rewound."""

    event = SubscriptionRewound

    subscriptions: Texts
    positions: Ints
    operators: OptionalTexts


class SubscriptionAdvancedRun(Run, frozen=True, tag="SubscriptionAdvanced.1"):
    """Progress of subscriptions."""

    event = SubscriptionAdvanced

    subscriptions: Texts
    statuses: Texts
    positions: Ints
    skipped: Ints


class SubscriptionDeletedRun(Run, frozen=True, tag="SubscriptionDeleted.1"):
    """Subscriptions that operators deleted."""

    event = SubscriptionDeleted

    subscriptions: Texts
    operators: OptionalTexts


class ScheduleSetRun(Run, frozen=True, tag="ScheduleSet.1"):
    """Schedules that were created or changed."""

    event = ScheduleSet

    schedules: Texts
    specs: ScheduleSpec | list[ScheduleSpec]
    from_code: bool | list[bool]
    operators: OptionalTexts


class SchedulePausedRun(Run, frozen=True, tag="SchedulePaused.1"):
    """Schedules that operators paused."""

    event = SchedulePaused

    schedules: Texts
    operators: OptionalTexts


class ScheduleResumedRun(Run, frozen=True, tag="ScheduleResumed.1"):
    """Schedules that operators resumed."""

    event = ScheduleResumed

    schedules: Texts
    operators: OptionalTexts


class ScheduleRanRun(Run, frozen=True, tag="ScheduleRan.1"):
    """Messages that schedules sent, and ticks that they left out."""

    event = ScheduleRan

    schedules: Texts
    ticks: Ints
    messages: OptionalBytes
    operators: OptionalTexts


class ScheduleDeletedRun(Run, frozen=True, tag="ScheduleDeleted.1"):
    """Schedules that operators deleted."""

    event = ScheduleDeleted

    schedules: Texts
    operators: OptionalTexts
