"""The base class of versions under construction in stores with a catalog of versions."""

from collections.abc import Mapping

import msgspec

from postroom.adapters.sql.versions import SIDE_TABLES, Versions
from postroom.projections.plan import Plan, Truncated

INDEXED = "indexed"
"""Mark of a version that is loaded and indexed."""


class CatalogBuild:
    """The methods of `Build` that only use the catalog."""

    def __init__(self, versions: Versions, version: int, plan: Plan) -> None:
        self.version = version
        self.plan = plan
        self._versions = versions

    @property
    def is_loaded(self) -> bool:
        """Return whether all rows are loaded and indexed."""
        return INDEXED in self._marks()

    def parked(self) -> int:
        """Return the number of records that could not be folded."""
        return self._versions.parked(self.version)

    def differences(self) -> list[str]:
        """Compare with the active version; see `Build.differences`."""
        return self._versions.differences(self.version, self.plan)

    def flip(self, counts: Mapping[str, int], seconds: Mapping[str, float]) -> None:
        """Make this version the active one; see `Build.flip`."""
        self._versions.flip(self.version, self.plan, counts, seconds)

    def fail(self, error: str) -> None:
        """Drop this version; see `Build.fail`."""
        self._versions.end(self.version, "failed", error)

    def _marks(self) -> frozenset[str]:
        return self._versions.parts_done(self.version)

    def _note_truncated(self, truncated: Truncated) -> None:
        self.plan = msgspec.structs.replace(self.plan, truncated=truncated)
        self._versions.continue_(self.version, self.plan)

    def _note_indexed(self) -> None:
        """Set the cursors and the mark; within a transaction."""
        self._versions.start_cursor(self.version, self.plan)
        if not self.is_loaded:
            self._versions.mark(self.version, INDEXED, 0)

    def _tables(self) -> list[str]:
        """Return the tables of the models, without their version."""
        return [table for model in self.plan.models for table in (model, *SIDE_TABLES.get(model, ()))]
