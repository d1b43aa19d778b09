"""Events of the mailbox itself; those of its messages are in `postroom.domain.message`."""

from typing import Literal

from postroom.domain.event import Event
from postroom.domain.policy import TopicPolicy

MailboxMode = Literal["queue", "archive"]


class MailboxCreated(Event, frozen=True, gc=False):
    """The mailbox was created as a queue or as an archive (RFC-037)."""

    name: str
    mode: MailboxMode


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
    """An operator set the policy of a topic (svc-mailbox P-9)."""

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
