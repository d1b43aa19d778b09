"""`postroom export`: what a search finds, as files for other tools."""

import time
from typing import TYPE_CHECKING, Annotated, cast, get_args

from typer import Argument, Option

from postroom.adapters.cli.failures import NOTHING
from postroom.adapters.cli.filters import takes_filter
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage

if TYPE_CHECKING:
    from postroom.adapters.compose.export import Format
    from postroom.domain.search import EventFilter


@takes_filter
def export(
    session: Session,
    wanted: "EventFilter",
    format_: Annotated[str, Argument(metavar="parquet|delta|csv|json", help="How to write them.")],
    folder: Annotated[str, Argument(metavar="FOLDER", help="Where to; made where missing.")],
    by: Annotated[
        str, Option(metavar="topic|day", help="Partition by day and topic, or only by day.")
    ] = "topic",
    envelope: Annotated[bool, Option("--envelope/--no-envelope", help="With whole envelopes.")] = True,
    payload: Annotated[bool, Option("--payload", help="With payloads that are not encrypted.")] = False,
    overwrite: Annotated[bool, Option("--overwrite", help="Replace an export that is there.")] = False,
) -> int | None:
    """Export all messages that a search finds, by day and topic, as of the last `postroom project rebuild`.

    The folder holds the whole export in the end; whatever happens before, it is left as it was.
    """
    from postroom.adapters.compose.export import Format, export_messages

    if format_ not in get_args(Format):
        raise WrongUsage(f"The format {format_!r} must be one of {', '.join(get_args(Format))}.")
    if by not in ("topic", "day"):
        raise WrongUsage(f"--by {by!r} must be topic or day.")
    began = time.monotonic()

    def rate(messages: int) -> float:
        return messages / max(time.monotonic() - began, 0.001)

    with session.out.progress(f"Exporting to {folder}") as move:
        source, written = export_messages(
            session.existing_store(),
            wanted,
            cast("Format", format_),
            folder,
            by_topic=by == "topic",
            envelope=envelope,
            payload=payload,
            overwrite=overwrite,
            progress=lambda done: move(done, f"{done:,} messages, {rate(done):,.0f}/s"),
        )
    if session.out.as_json:
        facts = {
            "folder": folder,
            "format": format_,
            "messages": source.messages,
            "files": written.files,
            "bytes": written.bytes,
            "version": source.version,
            "positions": source.positions,
            "filter": source.filter,
            "seconds": round(time.monotonic() - began, 3),
        }
        session.out.json(facts)
    else:
        session.out.line(
            f"{source.messages:,} messages in {written.files:,} files ({written.bytes:,} bytes) in {folder}, "
            f"of version {source.version} of the read models; {rate(source.messages):,.0f} messages/s"
        )
    return None if source.messages else NOTHING
