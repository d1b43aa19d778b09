"""Members of a namespace: its mailboxes, which are only ever added (ADR 0063).

Each mailbox records in its log which members it learned of and when: its history. Receives keep the order
of keys that a new member took: if mailbox A first records member B at log time 9, the messages that A held at
that time are received before any message of B.

The members of a namespace in one store are fixed instead: each name says how many there are (ADR 0137).
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec
from blake3 import blake3

from postroom.domain.arguments import check_int
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.counts import TopicCount
from postroom.domain.names import check_mailbox, check_member

RESERVED_TOPIC = "$members"
"""Topic with the records of members, which callers of a namespace don't see, and prefix of their ids."""


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
        """Return the number of members: it identifies the list, as members are only added, in one order."""
        return len(self.members)


_FIXED = re.compile(r"([1-9][0-9]*)-of-([1-9][0-9]*)\Z")
MAX_FIXED = 64
"""Maximum number of members of a namespace in one store."""

Histories = Mapping[str, Sequence[MembersRecord]]
"""Records of members by mailbox, oldest first."""


def home_of(key: str, members: Iterable[str]) -> str:
    """Return the mailbox of a sticky key by rendezvous hashing: a new member takes keys only for itself."""

    def rank(member: str) -> tuple[bytes, str]:
        return blake3(f"{member}\0{key}".encode(errors="surrogatepass")).digest(), member

    return max(members, key=rank)


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

    Once a topic has no ready message, every message sent before was delivered or is delayed. Nobody waits for
    a delivered message that returns to its queue: within one mailbox, too, it comes after its successors.
    """
    return {
        row.topic for row in counts if row.ready and row.oldest_at is not None and row.oldest_at <= cutoff
    }


def check_members(names: Iterable[str], namespace: str) -> tuple[str, ...]:
    """Return the mailboxes of a namespace among `names`, sorted, each once.

    Raises: InvalidRequest for a malformed name.
    """
    return tuple(sorted({check_mailbox(name) for name in names if name.partition("@")[0] == namespace}))


def name_fixed_members(namespace: str, count: int) -> tuple[str, ...]:
    """Return the mailboxes of a namespace in one store, such as `acme@1-of-4`, sorted.

    Raises: InvalidRequest for a malformed namespace, and for a number that is out of range.
    """
    check_member("The namespace", namespace)
    check_int("The number of owners", count, 1, MAX_FIXED)
    return tuple(sorted(check_mailbox(f"{namespace}@{number}-of-{count}") for number in range(1, count + 1)))


def find_fixed_members(mailboxes: Iterable[str], namespace: str) -> tuple[str, ...]:
    """Return the mailboxes of a namespace in one store, sorted; none if it was not created.

    The name of any of them tells the names of all, including mailboxes that an interrupted creation left out.
    A mailbox with an impossible number, such as `acme@9-of-2`, is not one of them.

    Arguments:
        mailboxes: names of the store's mailboxes.

    Raises: InvalidRequest when they were created with different numbers.
    """
    own = (name.partition("@")[2] for name in mailboxes if name.partition("@")[0] == namespace)
    numbered = [(int(match[1]), int(match[2])) for match in map(_FIXED.match, own) if match]
    counts = {count for number, count in numbered if number <= count <= MAX_FIXED}
    if len(counts) > 1:
        numbers = " and ".join(map(str, sorted(counts)))
        raise InvalidRequest(
            f"The mailboxes of namespace {namespace} are of {numbers}, but a namespace has one number of "
            "mailboxes; restore a store in which it does."
        )
    return name_fixed_members(namespace, counts.pop()) if counts else ()
