"""Every route of the console, and what a token must permit for it."""

from typing import NamedTuple

from postroom.domain.capability.rights import Right

READ, PAYLOAD, ADMIN = Right.READ_HEADERS, Right.READ_PAYLOAD, Right.ADMIN
REDRIVE, SEND = Right.REDRIVE, Right.SEND
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

    operations: tuple[Right, ...] = (READ,)
    all_topics: bool = False
    path: str = ""
    form: tuple[tuple[str, str], ...] = ()
    is_mailbox: bool = True


FOREIGN = "foreign"
"""A message of the topic `payments`."""
UNKNOWN = "0199d3a0-0000-7000-8000-000000000001"
TOPIC = (("topic", "orders"),)
OF_MESSAGE = (("id", FOREIGN), ("job_id", UNKNOWN), ("new_id", UNKNOWN))
OF_SUBSCRIPTION = (("name", "mail"), ("start", "0"))
OF_SCHEDULE = (("name", "nightly"),)
OF_JOB = (("topics", "orders"), ("action", "redrive"), ("job_id", "0199d3a0-0000-7000-8000-000000000002"))
PUBLIC = {"GET /sign-in", "POST /sign-in", "POST /sign-out", "POST /refresh", "GET /static/{name}"}
"""Routes that need no session; that of the interval of updates sets a cookie of a preference."""
NEEDS = {
    "GET /": Need((), is_mailbox=False),  # leads to a page that the token may see
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
    "GET /cluster": Need((ADMIN,), all_topics=True),
    "GET /access": Need((), is_mailbox=False),
    "POST /access/end": Need((ADMIN,), all_topics=True),
    "GET /messages": Need((), is_mailbox=False),  # a form for an id
    "GET /messages/{id:path}": Need(all_topics=True, path=f"/messages/{FOREIGN}"),
    "GET /message/payload": Need((READ, PAYLOAD), all_topics=True, path=f"/message/payload?id={FOREIGN}"),
    "GET /message/resend": Need((READ, PAYLOAD), all_topics=True, path=f"/message/resend?id={FOREIGN}"),
    "POST /message/resend": Need((READ, PAYLOAD), all_topics=True, form=OF_MESSAGE),
    "POST /message/cancel": Need((READ, ADMIN), all_topics=True, form=OF_MESSAGE),
    "POST /message/reschedule": Need((READ, ADMIN), all_topics=True, form=(*OF_MESSAGE, ("delay", "1h"))),
    "GET /message/{action}": Need(all_topics=True, path=f"/message/redrive?id={FOREIGN}"),
    "POST /message/{action}": Need(
        (READ, REDRIVE), all_topics=True, path="/message/redrive", form=OF_MESSAGE
    ),
    "GET /dead-letters": Need(),
    "GET /dead-letters/letters": Need(),
    "GET /what-if": Need(),
    "GET /redrives": Need((REDRIVE,)),
    "POST /redrives": Need((REDRIVE,), form=OF_JOB),
    "GET /redrives/new": Need((REDRIVE,)),
    "GET /redrives/preview": Need((READ, REDRIVE), path="/redrives/preview?topics=orders&action=redrive"),
    "POST /redrives/preview": Need((READ, REDRIVE), form=OF_JOB),
    "GET /redrives/{job_id}": Need((REDRIVE,), all_topics=True, path=f"/redrives/{UNKNOWN}"),
    "GET /redrives/{job_id}/{action}": Need((REDRIVE,), all_topics=True, path=f"/redrives/{UNKNOWN}/undo"),
    "POST /redrives/{job_id}/{action}": Need((REDRIVE,), all_topics=True, path=f"/redrives/{UNKNOWN}/undo"),
    "GET /subscriptions": Need(),
    "GET /subscriptions/rewind": Need((READ, ADMIN), all_topics=True, path="/subscriptions/rewind?name=mail"),
    "POST /subscriptions/preview": Need((ADMIN,), all_topics=True, form=OF_SUBSCRIPTION),
    "POST /subscriptions/rewind": Need((ADMIN,), all_topics=True, form=OF_SUBSCRIPTION),
    "GET /subscriptions/delete": Need((READ, ADMIN), all_topics=True, path="/subscriptions/delete?name=mail"),
    "POST /subscriptions/delete": Need((ADMIN,), all_topics=True, form=OF_SUBSCRIPTION),
    "GET /schedules": Need(),
    "POST /schedules/pause": Need((ADMIN,), all_topics=True, form=OF_SCHEDULE),
    "POST /schedules/resume": Need((ADMIN,), all_topics=True, form=OF_SCHEDULE),
    "POST /schedules/run": Need((ADMIN,), all_topics=True, form=OF_SCHEDULE),
    "GET /schedules/delete": Need((ADMIN,), all_topics=True, path="/schedules/delete?name=nightly"),
    "POST /schedules/delete": Need((ADMIN,), all_topics=True, form=OF_SCHEDULE),
    "GET /search": Need(),
    "GET /tail": Need(path="/tail?topics=orders&after=0"),
    "GET /tail/live": Need(path="/tail/live?topics=orders&after=0"),
    "GET /timeline": Need(path="/timeline?correlation_id=none"),
    "GET /compare": Need(all_topics=True, path=f"/compare?id={FOREIGN}&id={FOREIGN}"),
    "GET /search/export": Need(all_topics=True, path="/search/export?format=csv"),
    "GET /search/suggestions/{field}": Need(path="/search/suggestions/topic"),
}


def need_of(route: str) -> Need | None:
    """Return what a route needs; None for one that is not listed, to which the least must be refused."""
    return NEEDS.get(route)


def is_permitted(need: Need, operations: frozenset[Right], *, mailbox: bool, topics: bool) -> bool:
    """Return whether a token may use a route.

    Arguments:
        operations: of the token.
        mailbox: whether it covers the mailbox.
        topics: whether it is limited to topics, of which `orders` is one.
    """
    if not need.is_mailbox:
        return True
    return mailbox and operations.issuperset(need.operations) and not (topics and need.all_topics)
