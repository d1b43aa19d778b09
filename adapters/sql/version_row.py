"""Versions of the read models, as the catalog stores them."""

from typing import Any

import msgspec

from postroom.domain.search import BodyRules
from postroom.projections.incremental.cursors import Version

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
