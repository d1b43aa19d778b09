"""The ends of mailbox logs, by SQL in any database, beside the cursors of read models."""

from collections.abc import Callable, Mapping
from typing import Any

from postroom.adapters.sql.statements import statements
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.projections.incremental.cursors import START, Cursor, Head

HEADS_PER_READ = 400
"""Number of mailboxes whose ends one statement reads; SQLite limits the terms of a UNION to 500."""
_SQL = statements("postroom.adapters.sql", "update.sql")


def read_heads(
    read: Callable[[str], list[tuple[Any, ...]]], tables: Mapping[str, str], cursors: Mapping[int, Cursor]
) -> list[Head]:
    """Return the heads of the mailbox logs in the order of ids; empty logs end at 0.

    Arguments:
        read: returns the rows of a statement on the log.
        tables: names of the tables `log` and `mailbox_names`.
        cursors: cursors by mailbox id, at whose positions the commits are looked up.
    """
    mailboxes = dict(read(_SQL["mailboxes"].format(**tables)))
    queries = []
    for id_ in mailboxes:
        base, position = id_ * POSITIONS_PER_MAILBOX, cursors.get(id_, START).position
        values = {"base": base, "end": base + POSITIONS_PER_MAILBOX, "place": base + position}
        queries.append(_SQL["head"].format(**tables, id=id_, position=position, **values).rstrip(";"))
    parts = (queries[start : start + HEADS_PER_READ] for start in range(0, len(queries), HEADS_PER_READ))
    return [
        Head(id_, mailboxes[id_], removed + 1, last or removed, (chain or b"").hex(), at or 0)
        for part in parts
        for id_, removed, last, chain, at in read(" UNION ALL ".join(part))
    ]
