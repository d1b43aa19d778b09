"""Handlers for operators: redrive, purge, settings, policies, pausing, erasure (svc-mailbox C-4, P-9)."""

import asyncio
from collections.abc import Callable, Iterator, Sequence

from postroom.application.erasure.message_cipher import read_pseudonym
from postroom.application.mailbox.engine import MailboxEngine
from postroom.application.mailbox.message_factory import MessageFactory
from postroom.application.mailbox.outgoing import NewId
from postroom.application.mailbox.receive import ReceiveMessages, StreamMessages
from postroom.application.mailbox.send import SendBatch, SendEnvelopes, SendMessage
from postroom.application.mailbox.settle import DeliveryWindows, make_settler
from postroom.application.ports.event_log import MailboxOwner
from postroom.application.reports import SearchReport, report_search, report_searches
from postroom.application.tracing import REDRIVE, tracer
from postroom.domain.arguments import check_int, check_items, check_optional_text, check_text, check_type
from postroom.domain.errors import InvalidRequest, Rejected
from postroom.domain.mailbox.commands import (
    Command,
    DeleteSearch,
    Erase,
    Pause,
    Purge,
    Redrive,
    Resume,
    SaveSearch,
    SetPolicy,
    SetSettings,
)
from postroom.domain.message import MessageSent
from postroom.domain.names import check_topic, check_uuid, message_stream
from postroom.domain.policy import TopicPolicy
from postroom.domain.saved_search import check_search_name, check_search_query, search_id
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
                redriven = await execute(self._owner, Redrive(topic, count, reason, only))
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
        while removed := await execute(self._owner, Purge(topic, dead, ready, CHUNK)):
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
        await execute(self._owner, command)


class SetMailboxSettings:
    """Handler that changes the settings of the mailbox (ADR 0098)."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, changes: SettingsChanges, *, replace: bool = False) -> bool:
        """Change the settings; they apply from now on, and stay whoever owns the mailbox.

        Arguments:
            replace: everything that the changes leave out becomes the default, except labels and the sections
                of topics with labels.

        Returns: whether that changed anything.
        Raises: InvalidRequest when a field is unknown, has a wrong type or is out of bounds; Unavailable.
        """
        command = SetSettings(check_changes(changes), check_type("replace", replace, bool))
        return await execute(self._owner, command) > 0


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
        await execute(self._owner, Pause(check_topic(topic)))


class ResumeTopic:
    """Handler that resumes a topic."""

    def __init__(self, owner: MailboxOwner) -> None:
        self._owner = owner

    async def __call__(self, topic: str) -> None:
        """Deliver the messages of `topic` again, to waiting receivers at once; idempotent.

        Raises: InvalidRequest, NotFound for an unknown topic, Unavailable.
        """
        await execute(self._owner, Resume(check_topic(topic)))


async def execute(owner: MailboxOwner, command: Command) -> int:
    """Return the number of events that a command caused; raise its refusal."""
    (answer,) = await owner.submit([command])
    if isinstance(answer, Rejected):
        raise answer
    assert isinstance(answer, int)
    return answer


class SavedSearches:
    """The saved searches of a mailbox, for its owner; see `Mailbox`."""

    _engine: MailboxEngine

    async def save_search(
        self, name: str, query: str, /, *, replace: bool = False, principal: str | None = None
    ) -> SearchReport:
        """Save a search; see `Mailbox.save_search`."""
        check_type("replace", replace, bool)
        check_optional_text("principal", principal)
        command = SaveSearch(check_search_name(name), check_search_query(query), replace, principal)
        await execute(self._engine, command)
        id_ = search_id(name, query)
        return report_search(id_, self._engine.mailbox.settings.saved_searches[id_])

    async def list_searches(self) -> list[SearchReport]:
        """Return the saved searches; see `Mailbox.list_searches`."""
        await self._engine.check_ownership()
        return report_searches(self._engine.mailbox.settings.saved_searches)

    async def delete_search(self, search_id: str, /) -> None:
        """Delete a saved search; see `Mailbox.delete_search`."""
        await execute(self._engine, DeleteSearch(check_uuid("The id of a search", search_id)))


class EraseMessages:
    """Handler that removes the unsettled messages and dead letters of an erased subject, for the owner."""

    def __init__(self, engine: MailboxEngine) -> None:
        self._engine = engine

    async def __call__(self, pseudonym: str) -> int:
        """Remove the messages, and return how many there were.

        Consumers may still settle those in flight; none comes back or becomes a dead letter.

        Raises: InvalidRequest when the mailbox is not encrypted or the key was not destroyed,
            UnknownPseudonym, Unavailable.
        """
        check_text("pseudonym", pseudonym, 1)
        protection = self._engine.protection
        if protection is None:
            raise InvalidRequest(f"Mailbox {self._engine.name} has no settings of erasure; add them.")
        if (await asyncio.to_thread(protection.keys.resolve, [pseudonym]))[pseudonym] is not None:
            raise InvalidRequest(f"The key of {pseudonym} is not destroyed; run postroom erase.")
        # What was encrypted with the key before it was destroyed is in the mailbox after these two.
        await protection.wait_until_submitted()
        await self._engine.submit([Erase(frozenset())])
        positions = [each.position for each in self._engine.mailbox.messages.values()]
        removed = 0
        for some in _chunks(sorted(positions)):
            streams = await asyncio.to_thread(self._streams_of, pseudonym, some)
            if streams:
                removed += await execute(self._engine, Erase(streams))
        return removed

    def _streams_of(self, pseudonym: str, positions: Sequence[int]) -> frozenset[bytes]:
        sent = [each.event for each in self._engine.log.at_positions(positions).values()]
        return frozenset(
            each.stream
            for each in sent
            if isinstance(each, MessageSent) and read_pseudonym(each) == pseudonym
        )


def _chunks(positions: Sequence[int]) -> Iterator[Sequence[int]]:
    return (positions[start : start + CHUNK] for start in range(0, len(positions), CHUNK))


class CommandHandlers:
    """The command handlers of one mailbox, over its owner; each is an async callable."""

    def __init__(self, owner: MailboxOwner, wall: Callable[[], int], new_id: NewId) -> None:
        """Initialise with the owner, the wall clock in µs, and a generator of UUIDv7s."""
        factory = MessageFactory(owner.name, wall, new_id)
        self._name = owner.name
        self._factory = factory
        self.send_message = SendMessage(owner, factory)
        self.send_batch = SendBatch(owner, factory)
        self.send_envelopes = SendEnvelopes(owner, factory)
        windows = DeliveryWindows()
        settler = make_settler(owner, windows)
        self.receive_messages = ReceiveMessages(owner, settler)
        self.stream_messages = StreamMessages(self.receive_messages, settler.nack_messages, windows)
        self.ack_messages = settler.ack_messages
        self.nack_messages = settler.nack_messages
        self.extend_visibility = settler.extend_visibility
        self.redrive_dead_letters = RedriveDeadLetters(owner)
        self.purge_topic = PurgeTopic(owner)
        self.set_settings = SetMailboxSettings(owner)
        self.set_topic_policy = SetTopicPolicy(owner)
        self.pause_topic = PauseTopic(owner)
        self.resume_topic = ResumeTopic(owner)

    @property
    def name(self) -> str:
        """Return the name of the mailbox."""
        return self._name
