"""`Guard`: whether one capability permits a call now."""

from collections.abc import Callable, Iterable

from postroom.application.access.authority import Authority
from postroom.application.access.quotas import Limit, Quotas
from postroom.domain.capability.access import Access, check_operation, uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, Unauthenticated

MAX_TOPICS = 1_000
"""Size of the cache of topics that were compared with a capability."""


class Guard:
    """The decisions about the calls of one capability on one mailbox.

    Arguments:
        refused: is called for each refusal.
    """

    def __init__(
        self, access: Access, mailbox: str, authority: Authority, quotas: Quotas, refused: Callable[[], None]
    ) -> None:
        self.access = access
        self.mailbox = mailbox
        self._authority = authority
        self._quotas = quotas
        self._limits: list[Limit] = quotas.limits_of(access)
        self._refused = refused
        self._topics: dict[str, bool] = {}
        self.operations = access.operations if access.covers_mailbox(mailbox) else frozenset()
        self.covers_all_topics = access.covers_all_topics
        self.has_quotas = bool(self._limits)

    def check_validity(self) -> None:
        """Raise Unauthenticated unless the capability is valid now and not revoked."""
        error = self.invalidity()
        if error is not None:
            self._refused()
            raise error

    async def is_valid(self) -> bool:
        """Return whether the capability is valid now and not revoked."""
        await self._authority.ensure_fresh()
        return self.invalidity() is None

    def invalidity(self) -> Unauthenticated | None:
        """Return the error if the capability is not valid now; None if it is."""
        return self._authority.invalidity(self.access)

    def check_operation(self, operation: Right) -> None:
        """Raise Forbidden unless the capability covers an operation on the mailbox."""
        if operation in self.operations:
            return
        self._refused()
        check_operation(self.access, operation, self.mailbox)

    def permits(self, operation: Right) -> bool:
        """Return whether the capability covers an operation."""
        return operation in self.access.operations

    def covers(self, topic: str) -> bool:
        """Return whether the capability covers a topic."""
        if self.covers_all_topics:
            return True
        is_covered = self._topics.get(topic)
        if is_covered is None:
            is_covered = self.access.covers_topic(topic)
            if len(self._topics) < MAX_TOPICS:
                self._topics[topic] = is_covered
        return is_covered

    def check_topics(self, topics: Iterable[str]) -> None:
        """Raise Forbidden unless the capability covers all of these topics."""
        if not self.covers_all_topics and not all(map(self.covers, topics)):
            self._refused()
            raise uncovered_topic()

    def check_all_topics(self) -> None:
        """Raise Forbidden if the capability is limited to topics."""
        if not self.covers_all_topics:
            self._refused()
            raise Forbidden(
                "The capability is limited to topics, and this concerns all topics of the mailbox; get one "
                "that covers all, or name topics.",
                "topic",
            )

    async def check(self, *operations: Right) -> None:
        """Raise unless the capability is valid and covers operations.

        Raises: Unauthenticated, Forbidden; Unavailable when revocations can't be read.
        """
        if self._authority.is_stale:  # nearly never, so the call is spared
            await self._authority.ensure_fresh()
        self.check_validity()
        for operation in operations:
            self.check_operation(operation)

    def charge(self, operations: int = 1, size: int = 0) -> None:
        """Count operations and bytes against the quotas; raise Saturated when one is used up."""
        if self._limits:
            self._quotas.charge(self._limits, operations, size)

    def count_bytes(self, sizes: Iterable[int]) -> None:
        """Count the bytes of payloads that were returned."""
        if self._limits:
            self._quotas.count_bytes(self._limits, sum(sizes))

    def at_most(self, messages: int) -> int:
        """Return how many of the requested messages a call may return."""
        limit = self.access.max_messages
        return messages if limit is None or type(messages) is not int else min(messages, limit)
