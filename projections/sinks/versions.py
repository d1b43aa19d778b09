"""Versions of read models in a database: begun, gone on with, flipped, rolled back and cleaned up."""

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from socket import gethostname
from typing import Any, Protocol

import msgspec
import polars as pl

from postroom.adapters.sql.statements import statements
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.cut import PLACES, MailboxCut
from postroom.projections.ddl import compare
from postroom.projections.fold import MESSAGES, RECORDS, record_schema
from postroom.projections.models.messages import PARTIAL, Parked
from postroom.projections.parking import parking
from postroom.projections.projection import POLARS, Projection, projections
from postroom.projections.sinks import Plan, Served

SIDE_TABLES = {"mailbox": ("header", "topic", "text")}
"""Tables that a model has beside its own, made for searching it."""
OF_MESSAGES = ("mailbox", "dead_letters", "header", "text")
"""Those whose rows have the place of a message as `id`."""
VERSIONED = re.compile(r"[a-z]\w*_v(\d+)\Z")

PARKED: dict[str, pl.DataType] = {
    **dict.fromkeys(("version", "place"), POLARS["int"]),
    "mailbox": POLARS["text"],
    "position": POLARS["int"],
    **dict.fromkeys(("type", "error"), POLARS["text"]),
    "parked_at": POLARS["int"],
}
"""The columns of `projection_parked`."""

_decode_models = msgspec.json.Decoder(dict[str, int]).decode
_decode_plan = msgspec.json.Decoder(Plan).decode


class Database(Protocol):
    """What keeps the versions.

    Arguments:
        where: as it may be shown.
        schema: what the names of tables begin with.
    """

    where: str
    schema: str

    def run(self, statement: str, facts: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each fact, and return its rows."""

    def transaction(self) -> AbstractContextManager[object]:
        """Make what is run inside one transaction."""

    def tables(self) -> list[str]:
        """Return the names of all tables."""

    def drop(self, table: str) -> bool:
        """Drop a table, unless somebody has been using it for too long; tell whether it is gone."""


class Versions:
    """The catalog of versions in one database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def run(self, name: str, /, **facts: Any) -> list[tuple[Any, ...]]:
        """Run a statement of `sql/versions.sql`."""
        return self.database.run(_statement(name, self.database.schema), facts)

    def served(self) -> Served | None:
        """Return the active version; one that an earlier release built has other columns, and is none."""
        for version, models in self.run("served"):
            if models is None:
                return None
            return Served(version, models_of(version, models), dict(self.run("cursor", version=version)))
        return None

    def begin(self, plan: Plan, served: Served | None, create: Callable[[int], None]) -> int:
        """Note a new version, make what it needs, and return its number."""
        with self.database.transaction():
            facts = {"owner": owner(), "now": now(), "cuts": _json(plan.cuts), "plan": _json(plan)}
            ((version,),) = self.run("begin", **facts)
            shared = {} if served is None or plan.through else served.models
            models = {**shared, **dict.fromkeys(plan.models, version)}
            self.run("share", version=version, models=_json(models))
            create(version)
        return int(version)

    def unfinished(self, request: tuple[object, ...]) -> tuple[int, Plan] | None:
        """Return the version that a killed process was building for the same request; drop all others."""
        found: tuple[int, Plan] | None = None
        for version, _, text in self.run("building"):
            plan = None if text is None else _decode_plan(text)
            if found is None and plan is not None and plan.request == request:
                found = (version, plan)
            else:
                self.end(version, "failed", "the rebuild was killed")
        return found

    def go_on(self, version: int, plan: Plan) -> None:
        """Note that this process builds a version now, and by which plan."""
        self.run("go_on", version=version, owner=owner(), plan=_json(plan))

    def parts_done(self, version: int) -> frozenset[str]:
        """Return which parts of a version are marked."""
        return frozenset(part for (part,) in self.run("parts", version=version))

    def mark(self, version: int, part: str, rows: int) -> None:
        """Mark a part as written; it never was before."""
        self.run("mark", version=version, part=part, rows=rows, now=now())

    def start_cursor(self, version: int, plan: Plan) -> None:
        """Note how far a version has come that is complete."""
        self.run("stop_cursor", version=version)
        for cut in plan.cuts:
            self.run("start_cursor", version=version, id=cut.id, name=cut.name, last=cut.last, at=cut.at)

    def flip(self, version: int, plan: Plan, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make a version the active one; see `Build.flip`."""
        with self.database.transaction():
            served = self.served()
            shared = self._shared(version, served)
            if (
                shared
                and served is not None
                and served.positions != dict(self.run("cursor", version=version))
            ):
                raise Unavailable(
                    f"The read models {self.database.where} moved on while {', '.join(plan.models)} were "
                    f"built, and version {version} shares {', '.join(shared)} with them; stop "
                    "`postroom project follow` meanwhile, or rebuild all models."
                )
            self.run("retire")
            self.run("activate", version=version, now=now(), counts=_json(counts), seconds=_json(seconds))
        self.clean()

    def end(self, version: int, status: str, error: str | None = None) -> None:
        """Give a version up; its tables go."""
        self.run("end", version=version, status=status, error=error)
        self.clean()

    def roll_back(self, to: int | None) -> int:
        """Make an earlier version active again; see `Sink.roll_back`."""
        with self.database.transaction():
            earlier = dict(self.run("earlier"))
            version = to if to is not None else next(iter(earlier), 0)
            if version not in earlier:
                asked = "no earlier version" if to is None else f"no version {to} that was kept"
                raise NotFound(
                    f"The read models {self.database.where} have {asked} to go back to; rebuild them "
                    "instead with `postroom project rebuild`."
                )
            self._join(version, models_of(version, earlier[version]))
            self.run("retire")
            self.run("reactivate", version=version)
        return version

    def parked(self, version: int) -> int:
        """Return how many records could not be folded."""
        return int(self.run("parked", version=version)[0][0])

    def differences(self, version: int, plan: Plan) -> list[str]:
        """Compare a version with the active one, model by model, in the database; see `Build.differences`."""
        served = self.served()
        found = []
        for name, projection in wanted(plan).items():
            if served is None or served.models.get(name, version) == version:
                continue
            count, find = compare(projection, version, served.models[name], self.database.schema)
            ((new, old, changed),) = self.database.run(count, {})
            for first in self.database.run(find, {}) if new or old or changed else ():
                key = ", ".join(
                    f"{column} {value}" for column, value in zip(projection.key, first, strict=True)
                )
                found.append(
                    f"{name}: {new:,} rows are new, {old:,} are gone, {changed:,} differ from version "
                    f"{served.version}; the first is that of {key}"
                )
        return found

    def clean(self) -> None:
        """Drop the tables that no version needs, but of those before the active one the newest."""
        earlier = self.run("earlier")
        for version, _ in earlier[1:]:
            self.run("end", version=version, status="dropped", error=None)
        kept = {
            (model, number)
            for version, text in self.run("kept")
            for model, number in models_of(version, text).items()
        }
        building = {version for version, _, _ in self.run("building")}
        needed = {
            f"{table}_v{number}"
            for model, number in kept
            for table in (model, *SIDE_TABLES.get(model, ()), "text_index", "word_index")
        }
        for table in self.database.tables():
            match = VERSIONED.match(table)
            if match is not None and table not in needed and int(match[1]) not in building:
                self.database.drop(table)
        for statement in ("forget_parts", "forget_parked", "forget_cursors"):
            self.run(statement)

    def _shared(self, version: int, served: Served | None) -> list[str]:
        """Return the models that a version that is being built takes over from the active one."""
        if served is None:
            return []
        models = {number: models_of(number, text) for number, text in self.run("kept")}[version]
        return sorted(name for name, number in models.items() if served.models.get(name) == number)

    def _join(self, version: int, models: Mapping[str, int]) -> None:
        """See that all tables of an earlier version are as far as its cursor says."""
        served = self.served()
        if served is None or dict(self.run("cursor", version=version)) == served.positions:
            return
        shared = {name for name, number in models.items() if served.models.get(name) == number}
        if shared == set(models):
            self.run("stop_cursor", version=version)
            self.run("copy_cursor", version=version, other=served.version)
        elif shared:
            own = sorted(set(models) - shared)
            raise Unavailable(
                f"Version {version} of the read models {self.database.where} shares "
                f"{', '.join(sorted(shared))} with version {served.version}, which has read on since; build "
                f"{', '.join(own)} anew instead, with `postroom project rebuild --only {','.join(own)}`."
            )


def models_of(version: int, text: str | None) -> dict[str, int]:
    """Return which version's table each model of a version is in; see the catalog's column `models`."""
    if text is None:
        return dict.fromkeys(("mailbox", "backlog", "dead_letters"), version)
    return _decode_models(text)


def wanted(plan: Plan) -> dict[str, Projection]:
    """Return the projections that a plan builds."""
    known = projections()
    return {name: known[name] for name in plan.models}


def staged(wanted: Mapping[str, Projection]) -> dict[str, dict[str, pl.DataType]]:
    """Return the names of the pieces that ranges leave over, and their columns."""
    records = record_schema(parking(wanted, []))
    return {MESSAGES: PARTIAL, **({RECORDS: records} if records else {})}


def parked_rows(parked: Iterable[Parked], cuts: Iterable[MailboxCut], version: int) -> pl.DataFrame:
    """Return the rows of `projection_parked` for records that could not be folded."""
    names = {cut.id: cut.name for cut in cuts}
    rows = [
        (version, place, names[place // PLACES], place % PLACES, type_, error, now())
        for place, type_, error in parked
    ]
    return pl.DataFrame(rows, schema=PARKED, orient="row").unique("place", keep="first")


def owner() -> str:
    """Return who this process is, in words an operator understands."""
    return f"process {os.getpid()} on {gethostname()}"


def now() -> int:
    """Return the wall clock, in µs since 1970 UTC."""
    return time.time_ns() // 1_000


@cache
def _statement(name: str, schema: str) -> str:
    return statements("postroom.projections", "sql/versions.sql")[name].replace("{schema}", schema)


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
