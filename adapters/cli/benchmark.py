"""`postroom bench`: measure this machine; what is measured is in `postroom.adapters.cli.bench`."""

from importlib import import_module
from typing import Annotated

from typer import Argument, Option

from postroom.adapters.cli.session import Session


def bench(
    session: Session,
    names: Annotated[
        list[str] | None, Argument(metavar="[NAME]...", help="Only measurements that begin so.")
    ] = None,
    output: Annotated[str, Option(metavar="FILE", help="Where to write the figures as JSON.")] = "bench.json",
    messages: Annotated[
        int, Option(metavar="COUNT", min=1_000, help="Messages in the store whose history is measured.")
    ] = 1_000_000,
) -> None:
    """Measure sends, receives, acks, search and rebuilds on this machine, and write the figures down."""
    import_module("postroom.adapters.cli.bench.run").run(session, names or [], output, messages)
