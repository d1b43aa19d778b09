"""Runs: the encoding of consecutive events of one type, column by column (ADR 0066).

A column whose values are all the same is stored as one value. The tag of a run is the name of the event and
its schema version: events whose fields change get a run with the next version, and the former run an
`upcast` method that returns it.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import astuple

from postroom.application.mailbox.job_columns import (
    RedriveRun,
    ScheduleDeletedRun,
    SchedulePausedRun,
    ScheduleRanRun,
    ScheduleResumedRun,
    ScheduleSetRun,
    SubscriptionAdvancedRun,
    SubscriptionDeletedRun,
    SubscriptionRewoundRun,
    SubscriptionSetRun,
)
from postroom.domain.commit import (
    Ints,
    OptionalBytes,
    OptionalInts,
    OptionalTexts,
    Run,
    Texts,
    column,
    expand,
    join,
    split,
)
from postroom.domain.integrity import digests
from postroom.domain.mailbox.events import (
    LogTruncated,
    MailboxCreated,
    MailboxMode,
    MailboxSettingsChanged,
    OwnershipTaken,
    TopicPaused,
    TopicPolicySet,
    TopicResumed,
)
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.names import STREAM_BYTES
from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event, StoredEvent
from postroom.domain.settings import MailboxSettings

HASH_BYTES = 32


class SentRun(Run, frozen=True, tag="MessageSent.1"):
    """Messages that were sent: the fields of `MessageSent`, with the fields of its `Headers` at the end."""

    event = MessageSent

    topics: Texts
    shards: Ints
    due: OptionalInts
    expires_at: Ints
    sizes: Ints
    idem_keys: OptionalTexts
    payload_hashes: bytes
    hash_chains: bytes
    envelopes_hashed: bytes
    priorities: Ints
    timestamps: Ints
    message_ids: OptionalTexts
    content_types: OptionalTexts
    schema_urls: OptionalTexts
    schema_versions: OptionalTexts
    encryptions: OptionalTexts
    correlation_ids: OptionalTexts
    principals: OptionalTexts
    namespaces: OptionalTexts
    trace_ids: OptionalTexts
    span_ids: OptionalTexts
    custom_headers: dict[str, str] | list[dict[str, str] | None] | None
    sticky_keys: OptionalTexts = None
    unique_keys: OptionalTexts = None
    copies_of: OptionalTexts = None

    @classmethod
    def of(cls, columns: Sequence[Sequence[Any]], distances: Sequence[int]) -> "SentRun":
        """Return the run of `MessageSent` events; it has the hashes of their envelopes."""
        streams, versions, _, *fields, headers, envelopes, priorities, sticky, unique, copies = columns
        *fields, payload_hashes, hash_chains = fields
        first = headers[0]  # messages that are sent together often have the very same
        are_same = headers.count(first) == len(headers)
        stored = (
            len(streams),
            join(streams, STREAM_BYTES),
            *map(column, (versions, distances, *fields)),
            join(payload_hashes, HASH_BYTES),
            join(hash_chains, HASH_BYTES),
            b"".join(digests(envelopes)),
            column(priorities),
            *(astuple(first) if are_same else map(column, zip(*map(astuple, headers), strict=True))),
            *map(column, (sticky, unique, copies)),
        )
        return cls(*stored)

    def events(self, at: int, envelopes: Iterator[bytes]) -> Iterable[Event]:
        """Return the `MessageSent` events with their envelopes; see `Run.events`."""
        topics, shards, due, expires_at, sizes, idem_keys, _, _, _, priorities, *rest = self.columns()
        *headers, sticky_keys, unique_keys, copies_of = rest
        return map(
            MessageSent,
            *self.identity(at),
            topics,
            shards,
            due,
            expires_at,
            sizes,
            idem_keys,
            split(self.payload_hashes, HASH_BYTES, self.count),
            split(self.hash_chains, HASH_BYTES, self.count),
            map(Headers, *headers),
            envelopes,
            priorities,
            sticky_keys,
            unique_keys,
            copies_of,
        )

    def columns(self) -> Iterator[Iterable[Any]]:
        """Yield the values of each column; hashes are joined."""
        return ((each,) if type(each) is bytes else expand(each, self.count) for each in astuple(self)[4:])

    def envelope_hashes(self) -> Iterable[bytes]:
        """Return the BLAKE3 hash of each envelope."""
        return split(self.envelopes_hashed, HASH_BYTES, self.count)


class ReceivedRun(Run, frozen=True, tag="MessageReceived.1"):
    """Deliveries of messages."""

    event = MessageReceived

    attempts: Ints
    due: Ints
    consumers: OptionalTexts
    principals: OptionalTexts = None
    capabilities: OptionalTexts = None


class ExtendedRun(Run, frozen=True, tag="MessageVisibilityExtended.1"):
    """Extensions of visibility timeouts."""

    event = MessageVisibilityExtended

    attempts: Ints
    due: Ints


class AckedRun(Run, frozen=True, tag="MessageAcked.1"):
    """Messages that were settled."""

    event = MessageAcked

    attempts: Ints
    results: OptionalBytes = None
    result_types: OptionalTexts = None


class RequeuedRun(Run, frozen=True, tag="MessageRequeued.1"):
    """Deliveries that failed or timed out."""

    event = MessageRequeued

    attempts: Ints
    due: Ints
    reasons: Texts
    last_errors: OptionalTexts


class DeadLetteredRun(Run, frozen=True, tag="MessageDeadLettered.1"):
    """Messages that became dead letters."""

    event = MessageDeadLettered

    attempts: Ints
    reasons: Texts
    last_errors: OptionalTexts
    expires_at: Ints
    tracebacks: OptionalBytes = None


class RedrivenRun(Run, frozen=True, tag="MessageRedriven.1"):
    """Dead letters that were redriven."""

    event = MessageRedriven

    due: Ints
    expires_at: Ints


class RescheduledRun(Run, frozen=True, tag="MessageRescheduled.1"):
    """Waiting messages that were rescheduled."""

    event = MessageRescheduled

    due: Ints
    expires_at: Ints
    principals: OptionalTexts


class ExpiredRun(Run, frozen=True, tag="MessageExpired.1"):
    """Messages that were removed unsettled."""

    event = MessageExpired

    reasons: Texts
    notes: OptionalTexts = None
    principals: OptionalTexts = None


class FirstCreatedRun(Run, frozen=True, tag="MailboxCreated.1"):
    """The creation of the mailbox, before its settings were stored."""

    event = MailboxCreated

    names: Texts
    modes: MailboxMode | list[MailboxMode]


class CreatedRun(Run, frozen=True, tag="MailboxCreated.2"):
    """The creation of the mailbox."""

    event = MailboxCreated

    names: Texts
    modes: MailboxMode | list[MailboxMode]
    settings: MailboxSettings | list[MailboxSettings | None] | None


class SettingsRun(Run, frozen=True, tag="MailboxSettingsChanged.1"):
    """Changes of the settings of the mailbox."""

    event = MailboxSettingsChanged

    settings: MailboxSettings | list[MailboxSettings]


class OwnershipRun(Run, frozen=True, tag="OwnershipTaken.1"):
    """Changes of the mailbox's owner."""

    event = OwnershipTaken

    epochs: Ints
    owners: Texts
    boots: Texts
    uptimes: Ints
    clocks_continue: bool | list[bool]


class PolicyRun(Run, frozen=True, tag="TopicPolicySet.1"):
    """Policies that operators set."""

    event = TopicPolicySet

    topics: Texts
    policies: TopicPolicy | list[TopicPolicy]


class PausedRun(Run, frozen=True, tag="TopicPaused.1"):
    """Topics that operators paused."""

    event = TopicPaused

    topics: Texts


class ResumedRun(Run, frozen=True, tag="TopicResumed.1"):
    """Topics that operators resumed."""

    event = TopicResumed

    topics: Texts


class TruncatedRun(Run, frozen=True, tag="LogTruncated.1"):
    """Removals of old commits."""

    event = LogTruncated

    through: Ints
    links: bytes | list[bytes]


class StoredRun(Run, frozen=True, tag="StoredEvent.1"):
    """Events of a log that is not a mailbox's."""

    event = StoredEvent

    topics: Texts
    states: bytes | list[bytes]


AnyRun = (
    SentRun
    | ReceivedRun
    | AckedRun
    | ExtendedRun
    | RequeuedRun
    | DeadLetteredRun
    | RedrivenRun
    | RescheduledRun
    | ExpiredRun
    | FirstCreatedRun
    | CreatedRun
    | SettingsRun
    | OwnershipRun
    | PolicyRun
    | PausedRun
    | ResumedRun
    | TruncatedRun
    | SubscriptionSetRun
    | SubscriptionRewoundRun
    | SubscriptionAdvancedRun
    | SubscriptionDeletedRun
    | ScheduleSetRun
    | SchedulePausedRun
    | ScheduleResumedRun
    | ScheduleRanRun
    | ScheduleDeletedRun
    | StoredRun
    | RedriveRun
)
RUNS: dict[type[Event], type[Run]] = {run.event: run for run in AnyRun.__args__}
"""The run that encodes each type of event: of several versions, the last one in `AnyRun`."""
