"""`GetTopicPolicy`: the policy of a topic."""

from collections.abc import Callable

from postroom.domain.mailbox.state import Mailbox
from postroom.domain.names import check_topic
from postroom.domain.policy import TopicPolicy


class GetTopicPolicy:
    """A query for the policy of a topic, which need not exist (svc-mailbox P-9)."""

    def __init__(self, state: Callable[[], Mailbox]) -> None:
        """Take the source of the mailbox's state."""
        self._state = state

    def __call__(self, topic: str) -> TopicPolicy:
        """Return the policy in force for `topic`; see `resolve_policy`.

        Raises: InvalidRequest for a malformed name.
        """
        return self._state().policy(check_topic(topic))
