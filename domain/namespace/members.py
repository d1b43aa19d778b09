"""Members of a namespace: its mailboxes, which are only ever added (ADR 0063).

Each mailbox records in its log which members it learned of and when: its history. Receives keep the order
of keys that a new member took: if mailbox A first records member B at log time 9, the messages that A held at
that time are received before any message of B.
"""

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from blake3 import blake3

from postroom.domain.mailbox.counts import TopicCount
from postroom.domain.names import check_mailbox

RESERVED_TOPIC = "$members"
"""Of the topic with the records of members, which callers of a namespace don't see, and of their ids."""


class MembersRecord(msgspec.Struct, frozen=True):
    """Members of a namespace as a mailbox recorded them.

    Arguments:
        members: names of the mailboxes, sorted.
        at: log time of the record in the mailbox that has it, µs.
    """

    members: tuple[str, ...]
    at: int

    @property
    def generation(self) -> int:
        """Return the number of members: it identifies them, since members are only added, in one order."""
        return len(self.members)


Histories = Mapping[str, Sequence[MembersRecord]]
"""Records of members by mailbox, oldest first."""


def home_of(key: str, members: Iterable[str]) -> str:
    """Return the mailbox of a sticky key by rendezvous hashing: a new member takes keys only for itself."""
    return max(members, key=lambda member: (blake3(f"{member}\0{key}".encode()).digest(), member))


def find_predecessors(mailbox: str, histories: Histories) -> dict[str, int]:
    """Return the members that are older than a mailbox, with the log time (µs) at which each learned of it.

    A member is older if it recorded members without the mailbox before members with it: only then may it have
    been sent messages whose keys are the mailbox's now.
    """
    cutoffs = {}
    for member, records in histories.items():
        if member == mailbox or not records or mailbox in records[0].members:
            continue
        learned = next((record.at for record in records if mailbox in record.members), None)
        if learned is not None:
            cutoffs[member] = learned
    return cutoffs


def undrained_topics(counts: Iterable[TopicCount], cutoff: int) -> set[str]:
    """Return the topics with messages of up to a log time (µs) that were never delivered.

    Once nothing of a topic is ready, all that was sent before was delivered or is delayed. A message that was
    delivered and comes back is not waited for: within one mailbox, too, it comes after its successors.
    """
    return {
        row.topic for row in counts if row.ready and row.oldest_at is not None and row.oldest_at <= cutoff
    }


def check_members(names: Iterable[str], namespace: str) -> tuple[str, ...]:
    """Return the mailboxes of a namespace among `names`, sorted, each once.

    Raises: InvalidRequest for a malformed name.
    """
    return tuple(sorted({check_mailbox(name) for name in names if name.partition("@")[0] == namespace}))
