"""Events of a mailbox itself: its settings, owners, topics and the removal of old commits."""

from typing import Literal, NamedTuple

import msgspec

from postroom.domain.policy import TopicPolicy
from postroom.domain.record import Event
from postroom.domain.settings import MailboxSettings

_COMMAND_LINE = "postroom "
_LIBRARY_VISIBILITY_MS = 5_000


def settings_before(owner: str) -> MailboxSettings:
    """Return the settings to assume for a mailbox whose log has none, by the name of its owner.

    Owners of the command line hid delivered messages for 30 s, owners of the library for 5 s.
    """
    if owner.startswith(_COMMAND_LINE):
        return MailboxSettings()
    return MailboxSettings(default_policy=TopicPolicy(visibility_ms=_LIBRARY_VISIBILITY_MS))


MailboxMode = Literal["queue", "archive"]


class MailboxCreated(Event, frozen=True, gc=False):
    """The mailbox was created as a queue or as an archive (RFC-037).

    `settings` is None in logs from before they were stored (ADR 0098).
    """

    name: str
    mode: MailboxMode
    settings: MailboxSettings | None = None


class MailboxSettingsChanged(Event, frozen=True, gc=False):
    """The settings of the mailbox were changed; `settings` are all of them after the change (ADR 0098)."""

    settings: MailboxSettings


class Clock(msgspec.Struct, frozen=True, array_like=True):
    """Log time `at` (µs) at one reading of a monotonic clock, `uptime` µs after `boot` (svc-mailbox I-17)."""

    boot: str
    uptime: int
    at: int


class OwnershipTaken(Event, frozen=True, gc=False):
    """A process became the only writer; `epoch` fences every older owner (RFC-049).

    Arguments:
        boot, uptime: the machine's boot id and monotonic clock in µs, from which the next owner on the same
            boot continues log time (svc-mailbox I-17).
        clock_continues: whether log time continues from the previous owner's; if not, visibility timeouts and
            replay windows restart, and expiry pauses for a while.
    """

    epoch: int
    owner: str
    boot: str
    uptime: int
    clock_continues: bool


class TopicPolicySet(Event, frozen=True, gc=False):
    """An operator set the policy of a topic, all its fields (svc-mailbox P-9)."""

    topic: str
    policy: TopicPolicy


class TopicPaused(Event, frozen=True, gc=False):
    """An operator paused a topic: its messages are not delivered until `TopicResumed`."""

    topic: str


class TopicResumed(Event, frozen=True, gc=False):
    """An operator resumed a topic."""

    topic: str


class LogTruncated(Event, frozen=True, gc=False):
    """Retention removed the commits up to `through`; `link` is the chain hash of the last one."""

    through: int
    link: bytes


class StoredSettings(NamedTuple):
    """Settings of a mailbox as its log has them.

    Arguments:
        is_stored: whether the log has them; for logs from before ADR 0098 they are assumed.
    """

    settings: MailboxSettings = MailboxSettings()
    is_stored: bool = False

    def after(self, event: Event) -> "StoredSettings":
        """Return the settings after an event of the mailbox; a policy set for a topic is its section."""
        settings, is_stored = self
        match event:
            case MailboxSettingsChanged(settings=changed):
                return StoredSettings(changed, True)
            case MailboxCreated(settings=MailboxSettings() as initial):
                return StoredSettings(initial, True)
            case TopicPolicySet(topic=topic, policy=policy):
                topics = {**settings.topics, topic: msgspec.structs.asdict(policy)}
                return StoredSettings(msgspec.structs.replace(settings, topics=topics), is_stored)
            case OwnershipTaken(owner=owner) if not is_stored:
                assumed = settings_before(owner).default_policy
                return StoredSettings(msgspec.structs.replace(settings, default_policy=assumed))
        return self


MailboxEvent = MailboxCreated | MailboxSettingsChanged | OwnershipTaken | TopicPolicySet
"""Events on which settings, and the deadlines of deliveries, depend."""
