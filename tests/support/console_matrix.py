"""Every route of the console, and what a token must permit for it."""

from typing import NamedTuple

from postroom.domain.capability.rights import Operation

READ, PAYLOAD, ADMIN = Operation.READ_HEADERS, Operation.READ_PAYLOAD, Operation.ADMIN
REDRIVE, SEND = Operation.REDRIVE, Operation.SEND
READS = (READ, PAYLOAD, REDRIVE, ADMIN)
"""Operations that let their bearer see or change something in the console."""


class Need(NamedTuple):
    """What a route needs.

    Arguments:
        operations: all of them.
        all_topics: whether a token that is limited to topics is refused.
        path: a path of the route, with its query; the route's own by default.
        form: fields of a POST.
        is_mailbox: whether a token that does not cover the mailbox is refused.
    """

    operations: tuple[Operation, ...] = (READ,)
    all_topics: bool = False
    path: str = ""
    form: tuple[tuple[str, str], ...] = ()
    is_mailbox: bool = True


TOPIC = (("topic", "orders"),)
PUBLIC = {"GET /sign-in", "POST /sign-in", "POST /sign-out", "GET /start", "GET /static/{name}"}
"""Routes that need no session."""
NEEDS = {
    "GET /": Need(),
    "GET /live": Need(),
    "POST /topics/pause": Need((ADMIN,), form=TOPIC),
    "POST /topics/resume": Need((ADMIN,), form=TOPIC),
    "GET /log": Need(all_topics=True),
    "GET /log/commits": Need(all_topics=True),
    "GET /log/commits/{position}": Need(all_topics=True, path="/log/commits/1"),
    "GET /log/events/{position}": Need(all_topics=True, path="/log/events/1"),
    "GET /log/verify": Need(all_topics=True, path="/log/verify?from=1"),
    "GET /audit": Need((ADMIN,), all_topics=True),
    "GET /audit/verify": Need((ADMIN,), all_topics=True),
    "GET /access": Need((), is_mailbox=False),
    "POST /access/end": Need((ADMIN,), all_topics=True),
}


def need_of(route: str) -> Need | None:
    """Return what a route needs; None for one that is not listed, to which the least must be refused."""
    return NEEDS.get(route)


def is_permitted(need: Need, operations: frozenset[Operation], *, mailbox: bool, topics: bool) -> bool:
    """Return whether a token may use a route.

    Arguments:
        operations: of the token.
        mailbox: whether it covers the mailbox.
        topics: whether it is limited to topics, of which `orders` is one.
    """
    if not need.is_mailbox:
        return True
    return mailbox and operations.issuperset(need.operations) and not (topics and need.all_topics)
