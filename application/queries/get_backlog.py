"""`GetBacklog` and `ListTopics`: count the unsettled messages of a mailbox now or at a past moment.

The state is folded from a snapshot and the log after it; the owner of a mailbox passes its engine's state.
"""

from postroom.application.mailbox.stored_snapshots import refuse_altered_records
from postroom.application.messages import rfc3339
from postroom.application.queries.time_travel import StateAt
from postroom.application.query_results import Backlog, DlqProfile, Moment
from postroom.domain.arguments import check_optional_text
from postroom.domain.mailbox.counts import TopicSummary, count, summarize_topics


class GetBacklog:
    """A query for the numbers of ready, delayed, in-flight and dead messages by topic and shard."""

    def __init__(self, state_at: StateAt, dlq_profile: DlqProfile = "durable") -> None:
        self._state_at = state_at
        self._dlq_profile = dlq_profile

    @refuse_altered_records
    def __call__(self, topic: str | None = None, *, at: Moment | None = None) -> Backlog:
        """Return the backlog of one topic or of all, now or as it was at a moment (see `StateAt`)."""
        check_optional_text("topic", topic)
        mailbox, as_of = self._state_at(at)
        shards = [row for row in count(mailbox, as_of) if topic in (None, row.topic)]
        return Backlog(
            mailbox.name,
            mailbox.position,
            mailbox.epoch,
            mailbox.owner,
            rfc3339(mailbox.at or None) or "",
            mailbox.archived,
            rfc3339(as_of) or "",
            shards,
            [name for name in sorted(mailbox.paused_topics) if topic in (None, name)],
            self._dlq_profile,
        )


class ListTopics:
    """A query for the topics that hold messages or idempotency keys, have a policy, or are paused."""

    def __init__(self, state_at: StateAt) -> None:
        self._state_at = state_at

    def __call__(self) -> list[TopicSummary]:
        """Return the topics as they are now, sorted by name."""
        return summarize_topics(*self._state_at(None))
