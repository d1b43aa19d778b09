"""The lease under which a mailbox is opened, and the ownership of its store that follows from it."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

from postroom.application.ports.ownership import Ownership
from postroom.application.telemetry import logger
from postroom.domain.errors import MailboxOwned, Unavailable

RETRY_MS = 1_000


class LeaseTerm(NamedTuple):
    """The term of a lease: its epoch, and whether it lasts."""

    epoch: int
    may_append: Callable[[], bool]


@asynccontextmanager
async def own_by_lease(
    ownership: Ownership, mailbox: str, owner: str, wait_ms: int, term: LeaseTerm
) -> AsyncIterator[None]:
    """Own a mailbox in its store while the context lasts; evict a former owner that does not release it.

    The lease says who owns the mailbox, so whoever has the lock of the store hangs or has no lease. The log
    refuses what it appends, as soon as this owner has taken the log over (ADR 0042).

    Arguments:
        wait_ms: time for the former owner to release it.

    Raises: Unavailable when the lease has ended, or the store can't be used.
    """
    async with AsyncExitStack() as owned:
        while True:
            incumbent = await ownership.incumbent(mailbox)  # before the wait: a later owner is not evicted
            try:
                await owned.enter_async_context(ownership.acquire(mailbox, owner, wait_ms))
                break
            except MailboxOwned as error:
                if not term.may_append():
                    raise Unavailable(
                        f"The lease of mailbox {mailbox} ended before its former owner was replaced; retry "
                        "shortly.",
                        RETRY_MS,
                    ) from error
                if incumbent is not None:
                    logger().warning("mailbox.owner_evicted", mailbox=mailbox, owner=error.owner)
                    await ownership.evict(mailbox, incumbent)
        yield
