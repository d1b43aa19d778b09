"""Taking a mailbox over: the record with which an owner fences all former ones."""

from collections.abc import Awaitable, Callable

from postroom.application.mailbox.loaded_mailbox import LoadedMailbox
from postroom.application.mailbox.log_writer import LogWriter
from postroom.application.ports.clock import Clock
from postroom.application.telemetry import logger
from postroom.domain.errors import WrongPosition
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.events import MailboxMode
from postroom.domain.mailbox.log_clock import Anchor, anchor
from postroom.domain.settings import SettingsChanges

OWNERSHIP_TRIES = 5
"""Attempts of a new owner to append while the previous owner still appends."""


async def take_over(
    load: Callable[[], Awaitable[LoadedMailbox]],
    writer: LogWriter,
    clock: Clock,
    owner: str,
    mode: MailboxMode | None,
    settings: SettingsChanges,
    *,
    epoch: int | None,
    accept_clock: bool,
    can_encrypt: bool,
) -> tuple[LoadedMailbox, Anchor]:
    """Load a mailbox and append `OwnershipTaken`; return its state, and the anchor of log time.

    Arguments: as of `MailboxEngine.open`.
    Raises: as `MailboxEngine.open`.
    """
    attempt = 1
    while True:
        began = clock.uptime()
        state = await load()
        loaded, replayed = clock.uptime(), state.records_since_snapshot
        mailbox, boot, uptime = state.mailbox, clock.boot(), clock.uptime()
        time = anchor(mailbox, wall=clock.wall(), boot=boot, uptime=uptime, accept_clock=accept_clock)
        command = TakeOwnership(
            mailbox.name, mode, owner, boot, uptime, time.continues, epoch, settings, can_encrypt
        )
        try:
            await writer.append(state.take_ownership(command, time.at))
        except WrongPosition:
            if attempt == OWNERSHIP_TRIES:
                raise
            attempt += 1
            continue
        logger().info(
            "mailbox.owned",
            mailbox=mailbox.name,
            epoch=state.epoch,
            position=mailbox.position,
            replayed=replayed,
            load_ms=(loaded - began) // 1_000,
            append_ms=(clock.uptime() - loaded) // 1_000,
        )
        return state, time
