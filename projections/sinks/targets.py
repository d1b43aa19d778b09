"""Targets by their names, such as `parquet:FOLDER`."""

from postroom.domain.errors import InvalidRequest, Unavailable
from postroom.projections.sinks import Sink
from postroom.projections.sinks.target import Target, TargetSink

_EXTRAS = {
    "parquet": "spark",
    "delta": "delta",
    "chdb": "clickhouse",
    "clickhouse": "clickhouse",
    "clickhouses": "clickhouse",
}
"""What is installed for each kind of target."""


def open_target(into: str) -> Sink:
    """Return read models in another place than where search reads them.

    Arguments:
        into: `parquet:FOLDER`, `delta:FOLDER`, `chdb:FOLDER`, or `clickhouse://user:password@host:port/database`,
            with `clickhouses` for TLS.

    Raises: InvalidRequest for any other. Unavailable when a library is missing.
    """
    kind, _, place = into.partition(":")
    if kind not in _EXTRAS or not place.strip("/"):
        raise InvalidRequest(
            f"Read models can't be built into {kind}:...; name parquet:FOLDER, delta:FOLDER, chdb:FOLDER or "
            "clickhouse://user@host:8123/database."
        )
    try:
        return TargetSink(_target(kind, place, into))
    except ImportError as error:
        raise Unavailable(
            f"Building read models as {kind} needs {error.name}, which is not installed; run: "
            f"pip install 'postroom[{_EXTRAS[kind]}]'."
        ) from None


def _target(kind: str, place: str, into: str) -> Target:
    if kind == "parquet":
        from postroom.projections.sinks.parquet import ParquetTarget

        return ParquetTarget(place)
    if kind == "delta":
        from postroom.projections.sinks.delta import DeltaTarget

        return DeltaTarget(place)
    from postroom.projections.sinks.clickhouse import open_chdb, open_clickhouse

    return open_chdb(place) if kind == "chdb" else open_clickhouse(into)
