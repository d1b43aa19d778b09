"""`postroom bench`: measure this machine; what is measured is in `postroom.adapters.cli.bench`."""

from importlib import import_module
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from postroom.adapters.cli.session import Session


def bench(
    session: Session,
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Only measurements that begin so.")
    ] = None,
    output: Annotated[str, Option(metavar="FILE", help="Where to write the figures as JSON.")] = "bench.json",
    messages: Annotated[
        int, Option(metavar="COUNT", min=1_000, help="Messages in the stores whose history is measured.")
    ] = 1_000_000,
    interleave: Annotated[
        Literal["life", "none"],
        Option(help="For Spark: sends, receives and acks mixed as in life, or one kind after the other."),
    ] = "life",
    runs: Annotated[
        int, Option(metavar="COUNT", min=0, help="For Spark: runs of each, 0 for 3, and 1 if very large.")
    ] = 0,
    keep: Annotated[
        Path | None,
        Option(metavar="FOLDER", help="For Spark: keep the stores here, and take them from here."),
    ] = None,
) -> None:
    """Measure sends, receives, acks, search and rebuilds on this machine, and write the figures down."""
    # Imported here, as what is measured takes long to load.
    options = import_module("postroom.adapters.cli.bench.spark").Options(interleave, keep, runs)
    import_module("postroom.adapters.cli.bench.run").run(session, names or [], output, messages, options)
