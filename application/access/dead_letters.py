"""Queries on the dead letters in the read models, as the bearer of one capability may make them."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from postroom.application.ports.dead_letters import DeadLetterFilter
from postroom.application.service import Session
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden

F = TypeVar("F", bound=DeadLetterFilter)
R = TypeVar("R")


async def read_dead_letters(
    session: Session,
    filter_: F,
    read: Callable[[F], Awaitable[R]],
    nothing: R,
    count: Callable[[R], int],
    criterion: str,
) -> R:
    """Return the result of a query on dead letters; it is audited, as their errors are texts of consumers.

    Arguments:
        nothing: result for a session whose topics the filter excludes.
        count: returns the number of dead letters in a result.
        criterion: name of the query, for the audit log.

    Raises: as `covered_filter`; Unavailable if the read can't be recorded.
    """

    async def run() -> R:
        visible = await covered_filter(session, filter_)
        return nothing if visible is None else await read(visible)

    return await session.audit(Right.READ_HEADERS, run, count, topics=filter_.topics, criteria=(criterion,))


async def covered_filter(session: Session, filter_: F) -> F | None:
    """Restrict a filter to the dead letters that a session may list, or return None if it may list none.

    Topics and globs that are named must be covered. Without any, the filter is narrowed to the topics with
    dead letters that are.

    Raises: Unauthenticated, Forbidden, Saturated.
    """
    grant, mailbox = session.grant, session.mailbox
    await grant.check(Right.READ_HEADERS)
    if filter_.mailbox not in (None, mailbox.name):
        raise Forbidden(
            f"The dead letters here are of the mailbox {mailbox.name}; ask another server.", "mailbox"
        )
    filter_ = msgspec.structs.replace(filter_, mailbox=mailbox.name)
    if grant.covers_all_topics:
        return filter_
    if filter_.topics:
        # The text of a glob is covered only if everything that it matches is.
        if not all(map(grant.covers, filter_.topics)):
            raise uncovered_topic()
        return filter_
    topics = [each.topic for each in await mailbox.list_topics() if each.dead and grant.covers(each.topic)]
    return msgspec.structs.replace(filter_, topics=tuple(topics)) if topics else None
