"""The catalog of read-model versions in a database."""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cache
from socket import gethostname
from typing import Any, Protocol

import msgspec
import polars as pl

from postroom.adapters.sql.ddl import compare
from postroom.adapters.sql.statements import statements
from postroom.adapters.sql.tables import chain_text, to_cursors
from postroom.domain.commit import POSITIONS_PER_MAILBOX
from postroom.domain.errors import NotFound, Unavailable
from postroom.projections.fold import MESSAGES, RECORDS
from postroom.projections.incremental import Cursor
from postroom.projections.log_reader import LogExtent
from postroom.projections.models.messages import ParkedRecord
from postroom.projections.plan import FORMAT, Plan
from postroom.projections.ports.read_model_store import ActiveVersion
from postroom.projections.projection import POLARS, load_projections
from postroom.projections.verify import describe_changes

SIDE_TABLES = {"mailbox": ("header", "topic", "text")}
"""Additional tables of a model, for searching it."""
_INDEXES = ("text_index", "word_index")
_PIECES = ("pieces", f"pieces_{MESSAGES}", f"pieces_{RECORDS}")
"""Tables of a version that is being built in PostgreSQL; `staged_` begins the names of others."""
OF_MESSAGES = ("mailbox", "dead_letters", "text")
"""Tables whose `id` is the place of a message."""

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
    """The database that contains the catalog.

    Arguments:
        where: its name for messages, without a password.
        schema: prefix of table names.
    """

    where: str
    schema: str

    def run(self, statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Run a statement with `:name` for each value, and return its rows."""

    def transaction(self) -> AbstractContextManager[object]:
        """Run the statements inside the context as one transaction."""

    def tables(self) -> list[str]:
        """Return the names of all tables."""

    def replace_views(self, models: Mapping[str, int]) -> None:
        """Make the views with stable names show these models; see `ddl.replace_views`."""

    def drop(self, table: str) -> bool:
        """Drop a table and return True, or return False if it remains in use for too long."""


class Versions:
    """The catalog of versions in one database."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def run(self, name: str, /, **values: Any) -> list[tuple[Any, ...]]:
        """Run a statement of `versions.sql`."""
        return self.database.run(_statement(name, self.database.schema), values)

    def active_version(self) -> ActiveVersion | None:
        """Return the active version, or None without one, or if it has the columns of an earlier release."""
        for version, models in self.run("active"):
            if models is None:
                return None
            return ActiveVersion(version, models_of(version, models), self._cursors(version))
        return None

    def begin(self, plan: Plan, active: ActiveVersion | None, create: Callable[[Plan, int], None]) -> int:
        """Insert a new version, create its tables, and return its number."""
        with self.database.transaction():
            values = {"owner": owner(), "now": now(), "cuts": _json(plan.extents), "plan": _json(plan)}
            ((version,),) = self.run("begin", **values)
            is_alone = active is None or plan.through or load_projections().keys() <= set(plan.models)
            shared = {} if active is None or is_alone else active.models
            models = {**shared, **dict.fromkeys(plan.models, version)}
            self.run("share", version=version, models=_json(models))
            create(plan, version)
        return int(version)

    def open(
        self,
        plan: Callable[[ActiveVersion | None], Plan],
        create: Callable[[Plan, int], None],
        *,
        restart: bool,
        is_usable: Callable[[int], bool] = lambda _: True,
    ) -> tuple[int, Plan]:
        """Continue the unfinished version with the same request, or begin one; see `ReadModelStore.build`.

        Arguments:
            create: creates the tables of a version.
            is_usable: returns whether the rows of an unfinished version are still complete.
        """
        active = self.active_version()
        planned = plan(active)
        unfinished = None if restart else self.unfinished(planned.request)
        if unfinished is not None and is_usable(unfinished[0]):
            version, planned = unfinished
            self.continue_(version, planned)
        else:
            self.unfinished(())
            version = self.begin(planned, active, create)
        self.clean()
        return version, planned

    def unfinished(self, request: tuple[object, ...]) -> tuple[int, Plan] | None:
        """Return the unfinished version with the same request, and drop all other unfinished ones."""
        unfinished: tuple[int, Plan] | None = None
        for version, _, text in self.run("building"):
            plan = None if text is None else _decode_plan(text)
            if unfinished is None and plan is not None and plan.request == request:
                unfinished = (version, plan)
            else:
                self.end(version, "failed", "the rebuild was killed")
        return unfinished

    def continue_(self, version: int, plan: Plan) -> None:
        """Record this process as the builder of a version, and its plan."""
        self.run("continue", version=version, owner=owner(), plan=_json(plan))

    def parts_done(self, version: int) -> frozenset[str]:
        """Return the parts of a version that are marked as written."""
        return frozenset(part for (part,) in self.run("parts", version=version))

    def mark(self, version: int, part: str, rows: int) -> None:
        """Mark a part as written."""
        self.run("mark", version=version, part=part, rows=rows, now=now())

    def start_cursor(self, version: int, plan: Plan) -> None:
        """Set the cursors of a complete version."""
        self.run("stop_cursor", version=version)
        for extent in plan.extents:
            self.run(
                "start_cursor",
                version=version,
                id=extent.id,
                name=extent.name,
                last=extent.last,
                at=extent.at,
                chain=chain_text(extent.last, extent.chain),
            )

    def flip(self, version: int, plan: Plan, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make a version the active one; see `Build.flip`."""
        with self.database.transaction():
            active = self.active_version()
            shared = self._shared_models(version, active)
            if shared and active is not None and not _are_equal(active.cursors, self._cursors(version)):
                raise Unavailable(
                    f"The read models {self.database.where} advanced while {', '.join(plan.models)} were "
                    f"built, and version {version} shares {', '.join(shared)} with them; stop "
                    "`postroom views follow` during the rebuild, or rebuild all models."
                )
            self.run("retire")
            self.run("activate", version=version, now=now(), counts=_json(counts), seconds=_json(seconds))
            self._replace_views()
        self.clean()

    def end(self, version: int, status: str, error: str | None = None) -> None:
        """Set the final status of a version, and drop its tables."""
        self.run("end", version=version, status=status, error=error)
        self.clean()

    def roll_back(self, to: int | None) -> int:
        """Make an earlier version active again; see `ReadModelStore.roll_back`."""
        with self.database.transaction():
            earlier = dict(self.run("earlier"))
            version = to if to is not None else next(iter(earlier), 0)
            if version not in earlier:
                missing = "no earlier version" if to is None else f"no version {to}"
                raise NotFound(
                    f"The read models {self.database.where} have {missing} to roll back to; rebuild them "
                    "with `postroom views rebuild`."
                )
            if earlier[version] is None:
                raise Unavailable(
                    f"Version {version} of the read models {self.database.where} was built by an "
                    "earlier release; rebuild them with `postroom views rebuild`."
                )
            self._check_cursor(version, models_of(version, earlier[version]))
            self.run("retire")
            self.run("reactivate", version=version)
            self._replace_views()
        return version

    def parked(self, version: int) -> int:
        """Return the number of records that could not be folded."""
        return int(self.run("parked", version=version)[0][0])

    def differences(self, version: int, plan: Plan) -> list[str]:
        """Compare a version with the active one, model by model, in the database; see `Build.differences`."""
        active = self.active_version()
        differences = []
        for name, projection in plan.projections().items():
            if active is None or active.models.get(name, version) == version:
                continue
            count, find = compare(projection, version, active.models[name], self.database.schema)
            ((added, removed, changed),) = self.database.run(count, {})
            for first in self.database.run(find, {}) if added or removed or changed else ():
                differences += [describe_changes(projection, added, removed, changed, first, active.version)]
        return differences

    def clean(self) -> None:
        """Drop the tables of all versions except the active one, the one before it, and unfinished ones."""
        earlier = self.run("earlier")
        for version, _ in earlier[1:]:
            self.run("end", version=version, status="dropped", error=None)
        current = {
            (model, number)
            for version, text in self.run("current")
            for model, number in models_of(version, text).items()
        }
        building = {version for version, _, _ in self.run("building")}
        needed = {
            f"{table}_v{number}"
            for model, number in current
            for table in (model, *SIDE_TABLES.get(model, ()), *_INDEXES)
        }
        for table, version in self.tables().items():
            if table not in needed and version not in building:
                self.database.drop(table)
        for statement in ("forget_parts", "forget_parked", "forget_cursors"):
            self.run(statement)

    def tables(self) -> dict[str, int]:
        """Return the version of each table of read models; a schema or folder may have tables of others."""
        owned = {
            f"{table}_v{number}": number
            for version, text in self.run("all")
            for model, number in models_of(version, text).items()
            for table in (model, f"staged_{model}", *SIDE_TABLES.get(model, ()), *_INDEXES, *_PIECES)
        }
        return {table: owned[table] for table in self.database.tables() if table in owned}

    def _replace_views(self) -> None:
        active = self.active_version()
        if active is not None:
            self.database.replace_views(active.models)

    def _shared_models(self, version: int, active: ActiveVersion | None) -> list[str]:
        """Return the models that a version shares with the active one."""
        if active is None:
            return []
        models = {number: models_of(number, text) for number, text in self.run("current")}[version]
        return sorted(name for name, number in models.items() if active.models.get(name) == number)

    def _cursors(self, version: int) -> dict[int, Cursor]:
        """Return the cursors of a version, by mailbox id."""
        return to_cursors(self.run("cursors", version=version))

    def _check_cursor(self, version: int, models: Mapping[str, int]) -> None:
        """Check that the tables of an earlier version match its cursor; move the cursor if that suffices."""
        active = self.active_version()
        if active is None or _are_equal(active.cursors, self._cursors(version)):
            return
        shared = {name for name, number in models.items() if active.models.get(name) == number}
        if shared == set(models):
            self.run("stop_cursor", version=version)
            self.run("copy_cursor", version=version, other=active.version)
        elif shared:
            others = sorted(set(models) - shared)
            raise Unavailable(
                f"Version {version} of the read models {self.database.where} shares "
                f"{', '.join(sorted(shared))} with version {active.version}, which has advanced since; "
                f"rebuild {', '.join(others)} instead, with "
                f"`postroom views rebuild --only {','.join(others)}`."
            )


def _are_equal(some: Mapping[int, Cursor], others: Mapping[int, Cursor]) -> bool:
    """Return whether cursors are at the same commits, as far as is known."""
    return some.keys() == others.keys() and all(
        each.position == other.position and (each.chain == other.chain or "" in (each.chain, other.chain))
        for each, other in ((each, others[id_]) for id_, each in some.items())
    )


def models_of(version: int, text: str | None) -> dict[str, int]:
    """Return the version whose table each model of a version uses; see the catalog's column `models`."""
    if text is None:
        return dict.fromkeys(("mailbox", "backlog", "dead_letters"), version)
    return _decode_models(text)


def parked_rows(parked: Iterable[ParkedRecord], extents: Iterable[LogExtent], version: int) -> pl.DataFrame:
    """Return the rows of `projection_parked` for records that could not be folded."""
    names = {extent.id: extent.name for extent in extents}
    rows = [
        (
            version,
            place,
            names[place // POSITIONS_PER_MAILBOX],
            place % POSITIONS_PER_MAILBOX,
            type_,
            error,
            now(),
        )
        for place, type_, error in parked
    ]
    return pl.DataFrame(rows, schema=PARKED, orient="row").unique("place", keep="first")


def owner() -> str:
    """Return a description of this process for operators."""
    return f"process {os.getpid()} on {gethostname()}"


def now() -> int:
    """Return the wall clock, in µs since 1970 UTC."""
    return time.time_ns() // 1_000


@cache
def _statement(name: str, schema: str) -> str:
    return statements("postroom.adapters.sql", "versions.sql", schema=schema, format=FORMAT)[name]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()
