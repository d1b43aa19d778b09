"""`postroom anchor`: store the ends of logs outside of the store."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.application.pluralize import pluralize


def anchor(
    session: Session,
    file: Annotated[str, Argument(metavar="FILE", help="Anchor file; created if it is missing.")],
    git: Annotated[bool, Option("--git", help="Commit FILE to the git repository that contains it.")] = False,
    timestamp: Annotated[
        str | None,
        Option(metavar="URL", help="Request a time stamp for each anchor from this RFC 3161 authority."),
    ] = None,
) -> None:
    """Append the end of each log to a file, so that `verify --anchor` detects truncated or rewritten logs.

    Without --mailbox, the audit log and the log of capabilities are anchored as well. If a log was truncated
    or rewritten since its last anchor, the command fails. Store FILE where users with access to the store
    can't write.
    """
    from postroom.adapters.cli.tables import Time
    from postroom.adapters.compose.anchors import anchor_store

    store = session.existing_store()
    if session.settings.mailbox is not None:
        session.mailboxes()  # checks its name
    result = anchor_store(
        store, Path(file), mailbox=session.settings.mailbox, git=git, timestamp_url=timestamp
    )
    if session.out.as_json:
        session.out.json({"file": file, "anchors": result.added, "unchanged": result.unchanged})
        return
    if result.added:
        session.out.table(
            ("log", "position", "recorded", "chain"),
            [(each.log, each.position, Time(each.at), each.chain[:16]) for each in result.added],
        )
        session.out.line()
    unchanged = f", {pluralize(result.unchanged, 'log')} unchanged" if result.unchanged else ""
    session.out.line(f"{file}: {pluralize(len(result.added), 'anchor')} added{unchanged}")
