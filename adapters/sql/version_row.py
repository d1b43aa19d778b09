"""Versions of the read models, as the catalog stores them."""

from collections.abc import Iterable
from typing import Any

import msgspec

from postroom.domain.search import BodyRules
from postroom.projections.incremental.cursors import Cursor, Version

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
