"""`ListTopics`: the topics of a mailbox with their policies and counts."""

from postroom.application.queries.time_travel import StateAt
from postroom.domain.mailbox.counts import TopicSummary, summarize_topics


class ListTopics:
    """A query for the topics that hold messages or idempotency keys, have a policy, or are paused."""

    def __init__(self, state_at: StateAt) -> None:
        self._state_at = state_at

    def __call__(self) -> list[TopicSummary]:
        """Return the topics as they are now, sorted by name."""
        return summarize_topics(*self._state_at(None))
