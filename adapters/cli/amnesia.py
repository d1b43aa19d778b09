"""Amnesia mode of `postroom serve`: nothing is written to a disk (svc-mailbox I-9)."""

from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.session import MEMORY, Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.amnesia import protect_memory
from postroom.application.telemetry import logger

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox


def enter_amnesia(session: Session, *addresses: str | None) -> Session:
    """Keep this process off every disk, and return the session with its store in memory.

    Arguments:
        addresses: where it is to listen.

    Raises: InvalidSettings when the store or an address is a file.
    """
    if session.settings.store not in (None, MEMORY):
        raise InvalidSettings(
            f"In amnesia mode the store is in memory, not {session.shown_store}; leave --store and "
            "POSTROOM_STORE out."
        )
    for address in addresses:
        if address and address.startswith("unix:"):
            raise InvalidSettings(
                f"Amnesia mode can't listen at {address}: a Unix socket is a file; use 127.0.0.1:PORT."
            )
    for reason in protect_memory():
        logger().warning("amnesia.unprotected", reason=reason)
    return session.with_settings(msgspec.structs.replace(session.settings, store=MEMORY))


async def report_loss(mailbox: "Mailbox") -> None:
    """Log how many messages end with this process."""
    backlog = await mailbox.get_backlog()
    logger().warning(
        "amnesia.forgotten",
        mailbox=backlog.mailbox,
        unsettled=sum(each.ready + each.delayed + each.in_flight for each in backlog.shards),
        dead_letters=sum(each.dead for each in backlog.shards),
    )
