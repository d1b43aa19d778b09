"""`postroom ingest dlq`: list, show, redrive and discard the dead letters of ingestion."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, readable
from postroom.application.extras import explain_missing_extra

if TYPE_CHECKING:
    from postroom.adapters.compose.ingest import IngestDeadLetter, IngestDeadLetterAdmin

Config = Annotated[
    str | None, Option("--config", metavar="FILE", help="Namespace file with the dead-letter subject.")
]
Namespace = Annotated[
    str | None, Option("--namespace", metavar="NAME", help="Namespace to use if the file defines several.")
]
Subject = Annotated[
    str | None, Option("--dlq", metavar="SUBJECT", help="Dead-letter subject, without --config.")
]
Url = Annotated[str | None, Option("--url", metavar="URL", help="NATS URL, without --config. [nats.url]")]
Number = Annotated[str, Argument(metavar="NUMBER", help="Number of the dead letter, as in the list.")]
Numbers = Annotated[
    list[str] | None, Argument(metavar="NUMBER...", help="Numbers of dead letters, as in the list.")
]
Limit = Annotated[
    int, Option("--limit", min=1, max=10_000, help="Maximum number of dead letters, oldest first.")
]


async def list_dead_letters(
    session: Session,
    limit: Limit = 100,
    config: Config = None,
    namespace: Namespace = None,
    subject: Subject = None,
    url: Url = None,
) -> None:
    """List messages that could not be stored, in the order of their original stream."""
    async with _open_admin(session, config, namespace, subject, url) as admin:
        _show_list(session, await admin.list(limit))


async def show_dead_letter(
    session: Session,
    number: Number,
    payload: Annotated[bool, Option("--payload", help="Write only the message, byte for byte.")] = False,
    config: Config = None,
    namespace: Namespace = None,
    subject: Subject = None,
    url: Url = None,
) -> None:
    """Show a dead letter: why it was not stored, its headers and its bytes."""
    async with _open_admin(session, config, namespace, subject, url) as admin:
        (letter,) = await admin.find(number)
    data, out = letter.message.data, session.out
    text, is_text = readable(data)
    if payload:
        out.bytes(data)
    elif out.as_json:
        out.json(_facts(letter) | {"headers": dict(letter.headers), "data" if is_text else "data_b64": text})
    else:
        out.facts(
            [*_facts(letter).items(), *((f"  {name}", value) for name, value in letter.headers.items())]
        )
        out.line()
        out.payload(text, is_text)


async def redrive(
    session: Session,
    numbers: Numbers = None,
    limit: Limit = 100,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show what would be redriven.")] = False,
    config: Config = None,
    namespace: Namespace = None,
    subject: Subject = None,
    url: Url = None,
) -> None:
    """Publish dead letters, by default all, to their original subjects again, in their original order.

    The ingester and every other consumer of the stream receive them like new messages. One that can't be
    stored again becomes a new dead letter.
    """
    count = 0
    async with _open_admin(session, config, namespace, subject, url) as admin:
        letters = await admin.find(*numbers) if numbers else await admin.list(limit)
        if dry_run:
            _show_list(session, letters)
            return
        try:
            async for _ in admin.redrive(letters):
                count += 1
        finally:
            session.out.result({"redriven": count}, f"{count:,} redriven")


async def discard(
    session: Session,
    numbers: Annotated[
        list[str], Argument(metavar="NUMBER...", help="Numbers of dead letters, as in the list.")
    ],
    config: Config = None,
    namespace: Namespace = None,
    subject: Subject = None,
    url: Url = None,
) -> None:
    """Remove dead letters permanently."""
    async with _open_admin(session, config, namespace, subject, url) as admin:
        letters = await admin.find(*numbers)
        await admin.discard(letters)
    session.out.result({"discarded": len(letters)}, f"{len(letters):,} discarded")


@asynccontextmanager
async def _open_admin(
    session: Session, config: str | None, namespace: str | None, subject: str | None, url: str | None
) -> AsyncIterator["IngestDeadLetterAdmin"]:
    with explain_missing_extra("nats"):
        from postroom.adapters.compose.ingest import (
            NatsSettings,
            NatsSource,
            find_namespace,
            load_namespaces,
            nats_settings,
            open_ingest_dead_letters,
        )

    if config is None:
        if subject is None:
            raise WrongUsage("Name the dead-letter subject: --dlq SUBJECT, or --config FILE.")
        nats = session.settings.section("nats", NatsSettings, {"url": url})
    else:
        if subject is not None or url is not None:
            raise WrongUsage(f"The file {config} names subject and server; omit --dlq and --url.")
        source = find_namespace(load_namespaces(config), namespace).source
        subject = source.dead_letter_subject if isinstance(source, NatsSource) else None
        if subject is None or not isinstance(source, NatsSource):
            raise WrongUsage(
                f"The namespace in {config} has no dead_letter_subject, so there are no dead letters."
            )
        nats = nats_settings(source)
    async with open_ingest_dead_letters(nats, subject) as admin:
        yield admin


def _facts(letter: "IngestDeadLetter") -> dict[str, Any]:
    return {
        "number": letter.sequence,
        "subject": letter.original_subject,
        "sequence": letter.original_sequence,
        "consumer": letter.consumer,
        "reason": letter.reason,
        "bytes": len(letter.message.data),
    }


def _show_list(session: Session, letters: "Sequence[IngestDeadLetter]") -> None:
    if session.out.as_json:
        session.out.json({"dead_letters": [_facts(letter) for letter in letters]})
        return
    columns = ("number", "subject", "sequence", "consumer", "reason", "bytes")
    rows = [tuple(_facts(letter).values()) for letter in letters]
    session.out.table(columns, rows, only_wide=("consumer",))
