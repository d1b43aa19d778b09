"""Events of the mailbox itself; those of its messages are in `postroom.domain.message`."""

from typing import Literal

from postroom.domain.event import Event
from postroom.domain.policy import TopicPolicy

MailboxMode = Literal["queue", "archive"]


class MailboxCreated(Event, frozen=True, gc=False):
    """The mailbox came into being, to queue messages or only to archive them (RFC-037)."""

    name: str
    mode: MailboxMode


class OwnershipTaken(Event, frozen=True, gc=False):
    """A process became the only writer; `epoch` fences every older owner (RFC-049).

    Arguments:
        boot, uptime: the machine boot and its monotonic reading in µs, so that the next owner on the same
            boot can go on with the same log time (svc-mailbox I-17).
        clock_continues: whether log time went on from the owner before; if not, messages in flight get
            their full visibility again, so that none reappears early, and idempotency keys their full window.
    """

    epoch: int
    owner: str
    boot: str
    uptime: int
    clock_continues: bool


class TopicPolicySet(Event, frozen=True, gc=False):
    """An operator set what a topic promises (svc-mailbox P-9)."""

    topic: str
    policy: TopicPolicy


class LogTruncated(Event, frozen=True, gc=False):
    """Retention removed the records up to and including `through`, whose chain hash was `link`."""

    through: int
    link: bytes
