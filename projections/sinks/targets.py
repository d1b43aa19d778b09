"""Targets by their names, such as `parquet:FOLDER`."""

from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.sinks import Sink
from postroom.projections.sinks.target import Target, TargetSink

_EXTRAS = {"delta": "delta", "chdb": "clickhouse", "clickhouse": "clickhouse", "clickhouses": "clickhouse"}


def open_target(into: str) -> Sink:
    """Return read models in another place than where search reads them.

    Arguments:
        into: `parquet:FOLDER`, `delta:FOLDER`, `chdb:FOLDER`, or `clickhouse://user:password@host:port/database`,
            with `clickhouses` for TLS.

    Raises: InvalidRequest for any other. Unavailable when a library is missing.
    """
    kind, _, place = into.partition(":")
    try:
        target = _target(kind, place, into)
    except ImportError as error:
        raise Unavailable(
            f"Building read models as {kind} needs {error.name}, which is not installed; run: "
            f"pip install 'postroom[{_EXTRAS.get(kind, 'spark')}]'."
        ) from None
    if target is None or not place.strip("/"):
        raise InvalidRequest(
            f"Read models can't be built into {kind}:...; name parquet:FOLDER, delta:FOLDER, chdb:FOLDER or "
            "clickhouse://user@host:8123/database."
        )
    return TargetSink(target)


def _target(kind: str, place: str, into: str) -> Target | None:
    match kind:
        case "parquet":
            from postroom.projections.sinks.parquet import ParquetTarget

            return ParquetTarget(place)
        case "delta":
            from postroom.projections.sinks.delta import DeltaTarget

            return DeltaTarget(place)
        case "chdb":
            from postroom.projections.sinks.clickhouse import open_chdb

            return open_chdb(place)
        case "clickhouse" | "clickhouses":
            from postroom.projections.sinks.clickhouse import open_clickhouse

            return open_clickhouse(into)
        case _:
            return None
