"""`postroom export`: search results as files for other tools."""

import time
from typing import TYPE_CHECKING, Annotated, cast, get_args

from typer import Argument, Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import takes_filter
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.adapters.compose.export import Format
    from postroom.domain.search import EventFilter


@takes_filter
def export(
    session: Session,
    criteria: "EventFilter",
    format_: Annotated[str, Argument(metavar="parquet|csv|json", help="File format.")],
    file: Annotated[str, Argument(metavar="FILE", help="Target file; its folder is created if missing.")],
    envelope: Annotated[bool, Option("--envelope/--no-envelope", help="Include the envelopes.")] = True,
    payload: Annotated[bool, Option("--payload", help="Include payloads that are not encrypted.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an export of the same format.")] = False,
) -> int | None:
    """Export the messages that a search finds, as of the read models.

    The file appears only when it is complete; a failure leaves it as it was.
    """
    from postroom.adapters.compose.export import Format, export_messages

    if format_ not in get_args(Format):
        raise WrongUsage(f"Unknown format {format_!r}; expected one of {', '.join(get_args(Format))}.")
    start = time.monotonic()

    def rate(messages: int) -> float:
        return messages / max(time.monotonic() - start, 0.001)

    with session.out.progress(f"Exporting to {file}") as advance:
        source, size = export_messages(
            session.existing_store(),
            criteria,
            cast("Format", format_),
            file,
            envelope=envelope,
            payload=payload,
            overwrite=overwrite,
            progress=lambda done: advance(done, f"{done:,} messages, {rate(done):,.0f}/s"),
        )
    if session.out.as_json:
        facts = {
            "file": file,
            "format": format_,
            "messages": source.messages,
            "bytes": size,
            "version": source.version,
            "positions": source.positions,
            "filter": source.filter,
            "seconds": round(time.monotonic() - start, 3),
        }
        session.out.json(facts)
    else:
        session.out.line(
            f"{pluralize(source.messages, 'message')} ({pluralize(size, 'byte')}) in {file}, "
            f"of version {source.version} of the read models; {rate(source.messages):,.0f} messages/s"
        )
    return None if source.messages else NOTHING
