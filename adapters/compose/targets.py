"""Targets of read models by their addresses, such as `parquet:FOLDER`."""

from typing import TYPE_CHECKING

from postroom.adapters.targets.read_model_store import Target, TargetReadModelStore
from postroom.application.extras import explain_missing_extra
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest
from postroom.projections.ports.read_model_store import ReadModelStore

if TYPE_CHECKING:
    from postroom.adapters.clickhouse.database import ClickHouseDatabase

_EXTRAS = {
    "parquet": "views",
    "chdb": "clickhouse",
    "clickhouse": "clickhouse",
    "clickhouses": "clickhouse",
}
"""The extra that each kind of target needs."""


def open_target(into: str) -> ReadModelStore:
    """Return the read model store in a target for other tools.

    Arguments:
        into: `parquet:FOLDER`, `chdb:FOLDER`, or `clickhouse://user:password@host:port/database`, with
            `clickhouses` for TLS.

    Raises: InvalidRequest for any other address. MissingExtra when a library is not installed.
    """
    kind, _, place = check_path("into", into).partition(":")
    if kind not in _EXTRAS or not place.strip("/"):
        raise InvalidRequest(
            f"Read models can't be built into {kind}:...; name parquet:FOLDER, chdb:FOLDER or "
            "clickhouse://user@host:8123/database."
        )
    with explain_missing_extra(_EXTRAS[kind]):
        return TargetReadModelStore(_target(kind, place, into))


def open_clickhouse(address: str, refusal: str) -> "ClickHouseDatabase":
    """Return the database of ClickHouse at an address.

    Arguments:
        address: `chdb:FOLDER` or `clickhouse://user:password@host:port/database`; see `open_target`.
        refusal: what other addresses can't be, such as `can't be queried`.

    Raises: InvalidRequest for any other address. MissingExtra when a library is not installed.
    """
    kind, _, place = check_path("address", address).partition(":")
    if _EXTRAS.get(kind) != "clickhouse" or not place.strip("/"):
        raise InvalidRequest(
            f"Read models in {kind}:... {refusal}; name clickhouse://user@host:8123/database or chdb:FOLDER."
        )
    with explain_missing_extra("clickhouse"):
        from postroom.adapters.clickhouse.database import open_database
    return open_database(address)


def _target(kind: str, place: str, into: str) -> Target:
    if kind == "parquet":
        from postroom.adapters.parquet.read_model_target import ParquetTarget

        return ParquetTarget(place)
    from postroom.adapters.clickhouse.database import open_database
    from postroom.adapters.clickhouse.read_model_target import ClickHouseTarget

    return ClickHouseTarget(open_database(into))
