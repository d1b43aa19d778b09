"""The commit that ends the epochs from before a restore."""

from postroom.application.mailbox.groups import LoadedMailbox
from postroom.application.mailbox.stored_snapshots import fold_from
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.commit import Commit
from postroom.domain.mailbox.commands import TakeOwnership
from postroom.domain.mailbox.state import Clock
from postroom.domain.names import is_mailbox


def fencing_commits(log: EventLogReader, epoch: int, owner: str) -> list[Commit]:
    """Return the commit that takes ownership of a restored mailbox; none for a log that is no mailbox.

    Epochs that were handed out after the backup are unknown. Receipts of those deliveries must not fit the
    deliveries of the restored log, so the next epochs begin above all of them.

    Arguments:
        epoch: ms since 1970 UTC; an epoch is added by each change of owner, so none is as high. A log whose
            epoch is higher gets the next one.
        owner: name of the process that restores, shown to operators.

    Raises: BrokenLog when the log can't be folded.
    """
    head = log.head()
    if head is None or not is_mailbox(log.mailbox):
        return []
    mailbox, _ = fold_from(log)
    # The reading of the clocks is the last owner's, as of the last commit: log time stands still meanwhile.
    clock = mailbox.clock or Clock("", 0, mailbox.at)
    uptime = clock.uptime + mailbox.at - clock.at
    command = TakeOwnership(
        log.mailbox,
        None,
        owner,
        clock.boot,
        uptime,
        clock_continues=True,
        epoch=max(epoch, mailbox.epoch + 1),
    )
    return LoadedMailbox(mailbox, head.chain).take_ownership(command, mailbox.at)
