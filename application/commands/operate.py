"""`ReprocessDeadLetters`, `PurgeTopic`, `SetTopicPolicy`: what operators do (svc-mailbox C-4, P-9)."""

from collections.abc import Sequence

from postroom.application.engine import MailboxEngine
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.event import Event
from postroom.domain.mailbox.commands import Command, Purge, Reprocess, SetPolicy
from postroom.domain.names import check_topic, message_stream
from postroom.domain.policy import TopicPolicy

CHUNK = 1_000
"""Messages an operator's command changes in one append, so that it never holds up senders for long."""


class ReprocessDeadLetters:
    """Put dead letters back into their queues, oldest first, with fresh attempts (svc-mailbox I-4, C-4)."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(
        self,
        topic: str,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Reprocess dead letters of `topic`.

        Arguments:
            limit: how many at most.
            reason: only those that died of this.
            message_ids: only these.

        Returns: how many went back; fewer than asked for when there are no more, or the shards are full.
        Raises: NotFound for an unknown topic, Saturated when the shards are full, Unavailable.
        """
        if limit < 1:
            raise InvalidRequest(f"limit must be at least 1; it was {limit}.")
        mailbox = self._engine.log.mailbox
        only = None if message_ids is None else frozenset(message_stream(mailbox, id_) for id_ in message_ids)
        done = 0
        while done < limit:
            count = min(CHUNK, limit - done)
            try:
                events = await _events(self._engine, Reprocess(topic, count, reason, only))
            except Rejected:
                if done:
                    return done
                raise
            done += len(events)
            if len(events) < count:
                break
        return done


class PurgeTopic:
    """Remove messages of a topic that are not in flight; each leaves a `MessageExpired` in the log."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, topic: str, *, dead: bool = True, ready: bool = False) -> int:
        """Purge the dead letters of `topic`, its ready messages, or both.

        Returns: how many were removed.
        Raises: NotFound for an unknown topic, Unavailable.
        """
        done = 0
        while events := await _events(self._engine, Purge(topic, dead, ready, CHUNK)):
            done += len(events)
        return done


class SetTopicPolicy:
    """Set what a topic promises, from now on; the log remembers since when (svc-mailbox P-9)."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, topic: str, policy: TopicPolicy) -> None:
        """Give `topic` a policy.

        Raises: InvalidRequest when a field is out of bounds, or the shard count changes under messages;
        Unavailable.
        """
        await _events(self._engine, SetPolicy(check_topic(topic), policy))


async def _events(engine: MailboxEngine, command: Command) -> Sequence[Event]:
    (answer,) = await engine.submit([command])
    if isinstance(answer, Rejected):
        raise answer
    return answer  # type: ignore[return-value]
