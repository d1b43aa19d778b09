"""Stores whose read models are followed: versions built without Spark, and what is in their tables."""

from collections.abc import Sequence

from postroom.projections.log_reader import LogExtent
from postroom.projections.projection import Row, load_projections
from tests.projections.histories import Store, begin, finish, fold_all, model_store, served_rows


def build(store: Store, extents: Sequence[LogExtent] = (), *, flip: bool = True) -> int:
    """Build a version of a store's read models up to extents, of nothing by default."""
    with begin(store, restart=True, extents=extents) as version:
        fold_all(store, version)
        finish(version, flip=flip)
    return version.version


def rows(store: Store) -> dict[str, list[Row]]:
    """Return the rows of each model of the active version, in the order of their keys."""
    active = model_store(store)
    return {name: served_rows(active, name) for name in load_projections()}
