"""Versions of the read models, as the catalog stores them, and the ends of the logs beside their cursors."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from postroom.adapters.sql.statements import statements
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.search import BodyRules
from postroom.projections.incremental.cursors import START, Cursor, Head, Version

_decode_models = msgspec.json.Decoder(dict[str, int]).decode


class _Plan(msgspec.Struct, frozen=True):
    """The fields of a version's `Plan` that an update needs."""

    bodies: str = "{}"
    archive: str | None = None


def to_version(row: tuple[Any, ...]) -> Version:
    """Return a version from a row of the catalog: its number, its status, and its tables and plan as JSON."""
    number, status, models, plan = row
    tables = {} if models is None else _decode_models(models)  # an earlier release's have other columns
    settings = msgspec.json.decode(plan, type=_Plan) if plan else _Plan()
    return Version(
        number, status, tables, msgspec.json.decode(settings.bodies, type=BodyRules), settings.archive
    )


def bodies_of(plan: str | None) -> BodyRules:
    """Return the topics whose bodies a version searches for words, from its plan as JSON."""
    settings = msgspec.json.decode(plan, type=_Plan) if plan else _Plan()
    return msgspec.json.decode(settings.bodies, type=BodyRules)


def to_cursors(rows: Iterable[tuple[Any, ...]]) -> dict[int, Cursor]:
    """Return the cursors of a version, by mailbox id, from rows of the catalog."""
    return {id_: Cursor(position, at, _chain(text, position), name) for id_, position, at, text, name in rows}


def chain_text(position: int, chain: str) -> str | None:
    """Return the chain hash of a cursor as the catalog stores it; None if it is unknown."""
    return f"{position}:{chain}" if chain else None


def _chain(text: str | None, position: int) -> str:
    """Return a chain hash from the catalog; empty if an earlier release has moved the cursor since."""
    stored_position, _, chain = (text or "").partition(":")
    return chain if stored_position == str(position) else ""


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
