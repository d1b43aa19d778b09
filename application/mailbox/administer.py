"""Handlers for operators: redrive, purge, settings, topic policies, pausing (svc-mailbox C-4, P-9)."""

from collections.abc import Sequence

from postroom.application.ports.mailbox_owner import MailboxOwner
from postroom.application.tracing import REDRIVE, tracer
from postroom.domain.arguments import check_int, check_items, check_optional_text, check_type
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.commands import Command, Pause, Purge, Redrive, Resume, SetPolicy, SetSettings
from postroom.domain.names import check_topic, message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.settings import PolicyChanges, SettingsChanges, check_changes, check_policy_changes

CHUNK = 1_000
"""Maximum number of messages changed in one append, so that senders never wait long."""


class RedriveDeadLetters:
    """Handler that redrives dead letters, oldest first (svc-mailbox I-4, C-4)."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(
        self,
        topic: str,
        *,
        limit: int = 100,
        reason: str | None = None,
        message_ids: Sequence[str] | None = None,
    ) -> int:
        """Redrive dead letters of `topic`.

        Arguments:
            limit: maximum number of messages.
            reason: redrive only those dead-lettered for this reason.
            message_ids: redrive only these.

        Returns: number of redriven messages; below `limit` when there are no more or the shards are full.
        Raises: InvalidRequest, NotFound for an unknown topic, Saturated when the shards are full,
            Unavailable.
        """
        check_topic(topic)
        check_int("limit", limit, 1)
        check_optional_text("reason", reason)
        only = None if message_ids is None else self._streams(topic, check_items("message_ids", message_ids))
        with tracer().span(REDRIVE, (topic,)):
            return await self._redrive(topic, limit, reason, only)

    async def _redrive(
        self, topic: str, limit: int, reason: str | None, only: frozenset[bytes] | None
    ) -> int:
        done = 0
        while done < limit:
            count = min(CHUNK, limit - done)
            try:
                redriven = await _execute(self._owner, Redrive(topic, count, reason, only))
            except Rejected:
                if done:
                    return done
                raise
            done += redriven
            if redriven < count:
                break
        return done

    def _streams(self, topic: str, message_ids: Sequence[object]) -> frozenset[bytes]:
        mailbox = self._owner.name
        return frozenset(
            message_stream(mailbox, id_, unique_in) for id_ in message_ids for unique_in in (None, topic)
        )


class PurgeTopic:
    """Handler that removes dead letters and ready messages; the log records each as `MessageExpired`."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, topic: str, *, dead: bool = True, ready: bool = False) -> int:
        """Purge the dead letters of `topic`, its ready messages, or both.

        Returns: number of removed messages.
        Raises: InvalidRequest, NotFound for an unknown topic, Unavailable.
        """
        check_topic(topic)
        check_type("dead", dead, bool)
        check_type("ready", ready, bool)
        done = 0
        while removed := await _execute(self._owner, Purge(topic, dead, ready, CHUNK)):
            done += removed
        return done


class SetTopicPolicy:
    """Handler that sets the policy of a topic (svc-mailbox P-9)."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, topic: str, policy: TopicPolicy | PolicyChanges) -> None:
        """Set the policy of `topic`; see `Mailbox.set_topic_policy`.

        Raises: InvalidRequest when a field has a wrong type or is out of bounds, Unavailable.
        """
        fields = check_policy_changes(policy)
        command: Command
        if isinstance(policy, TopicPolicy):
            command = SetPolicy(check_topic(topic), policy)
        else:
            command = SetSettings(SettingsChanges(topics={check_topic(topic): fields}))
        await _execute(self._owner, command)


class SetMailboxSettings:
    """Handler that changes the settings of the mailbox (ADR 0098)."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, changes: SettingsChanges, *, replace: bool = False) -> bool:
        """Change the settings; they apply from now on, and stay whoever owns the mailbox.

        Arguments:
            replace: everything that the changes leave out becomes the default.

        Returns: whether that changed anything.
        Raises: InvalidRequest when a field is unknown, has a wrong type or is out of bounds; Unavailable.
        """
        command = SetSettings(check_changes(changes), check_type("replace", replace, bool))
        return await _execute(self._owner, command) > 0


class PauseTopic:
    """Handler that pauses a topic: its messages are not delivered until it is resumed."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, topic: str) -> None:
        """Pause `topic`; idempotent.

        Deliveries in flight can be settled, and sends, delays, expiry and dead-lettering continue.

        Raises: InvalidRequest, NotFound for an unknown topic, Saturated when too many topics are paused,
            Unavailable.
        """
        await _execute(self._owner, Pause(check_topic(topic)))


class ResumeTopic:
    """Handler that resumes a topic."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, topic: str) -> None:
        """Deliver the messages of `topic` again, to waiting receivers at once; idempotent.

        Raises: InvalidRequest, NotFound for an unknown topic, Unavailable.
        """
        await _execute(self._owner, Resume(check_topic(topic)))


async def _execute(owner: MailboxOwner, command: Command) -> int:
    """Return the number of events that a command caused; raise its refusal."""
    (answer,) = await owner.submit([command])
    if isinstance(answer, Rejected):
        raise answer
    assert isinstance(answer, int)
    return answer
