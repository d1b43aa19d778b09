"""`GetTopicPolicy`: the policy that was set for a topic."""

from collections.abc import Callable

from postroom.domain.mailbox.state import Mailbox
from postroom.domain.names import check_topic
from postroom.domain.policy import TopicPolicy


class GetTopicPolicy:
    """A query for the policy recorded for a topic (svc-mailbox P-9)."""

    def __init__(self, state: Callable[[], Mailbox]) -> None:
        """Take the source of the mailbox's state."""
        self._state = state

    def __call__(self, topic: str) -> TopicPolicy | None:
        """Return the policy set for `topic`; None when the default policy applies.

        Raises: InvalidRequest for a malformed name.
        """
        return self._state().policies.get(check_topic(topic))
