"""`postroom mailbox`: list the mailboxes of a store."""

from postroom.adapters.cli.session import Session


async def list_mailboxes(session: Session) -> None:
    """List the mailboxes of a store: mode, current owner, and size of the log."""
    from postroom.adapters.compose.queries import describe_mailboxes

    names = session.mailboxes()
    mailboxes = [each for each in await describe_mailboxes(session.store) if each.mailbox in names]
    if session.out.as_json:
        session.out.json({"mailboxes": mailboxes})
        return
    session.out.table(
        ("mailbox", "mode", "owner", "epoch", "records", "size"),
        [
            (each.mailbox, each.mode, each.owner or "none", each.epoch, each.records, _size(each.bytes))
            for each in mailboxes
        ],
    )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
