"""`postroom ingest`: what a stream holds, into an archive that is searched."""

import asyncio
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Option

from postroom.adapters.cli.session import ARCHIVE_MAILBOX, Session
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.compose import Postroom
    from postroom.adapters.compose.ingest import Ingested, Namespace

ONCE_IDLE_MS = 1_000


async def ingest(
    session: Session,
    config: Annotated[
        str | None,
        Option("--config", metavar="FILE", help="Namespaces in YAML, as RFC-037 has them."),
    ] = None,
    namespace: Annotated[
        str | None, Option("--namespace", metavar="NAME", help="Which, where the file has several.")
    ] = None,
    url: Annotated[
        str | None, Option("--url", metavar="URL", help="Without a file: where NATS is. [nats.url]")
    ] = None,
    subject: Annotated[
        str | None, Option("--subject", metavar="SUBJECT", help="What to ingest; * and > are wildcards.")
    ] = None,
    durable: Annotated[
        str | None, Option("--durable", metavar="NAME", help="The durable consumer, made where missing.")
    ] = None,
    stream: Annotated[
        str | None, Option("--stream", metavar="NAME", help="Default: the stream that has the subject.")
    ] = None,
    dead_letters: Annotated[
        str | None,
        Option("--dlq", metavar="SUBJECT", help="Where to publish what can't be stored; default: skip it."),
    ] = None,
    once: Annotated[bool, Option("--once", help="End when nothing has come for a second.")] = False,
) -> None:
    """Store the envelopes of a stream in an archive, each exactly once, until interrupted.

    A message is acknowledged when the log holds it; after a crash of whatever is involved the ingester goes
    on where it was. A settings file is named before the command here: postroom --config postroom.toml ingest.
    """
    given = {"url": url, "subject": subject, "durable": durable, "stream": stream, "dlq": dead_letters}
    if config is not None:
        if used := [f"--{name}" for name, value in given.items() if value is not None]:
            raise WrongUsage(f"{', '.join(used)} is said by the file {config}; leave it out, or the file.")
        chosen = _from_file(config, namespace)
    else:
        chosen = _from_flags(session, namespace, given)
    session = _for_namespace(session, chosen)
    async with session.own(chosen.mailbox, create=True, mode="archive") as postroom:
        if postroom.engine.mailbox.mode != "archive":
            raise InvalidRequest(
                f"Mailbox {chosen.mailbox} delivers its messages; ingest into an archive: name another "
                "with --mailbox, or mailbox in the namespace's storage slot."
            )
        await _run(session, chosen, postroom, once)


def _from_file(config: str, name: str | None) -> "Namespace":
    from postroom.adapters.compose.ingest import find_namespace, load_namespaces

    return find_namespace(load_namespaces(config), name)


def _from_flags(session: Session, namespace: str | None, given: dict[str, str | None]) -> "Namespace":
    from postroom.adapters.compose.ingest import Namespace, NatsSettings, NatsSource
    from postroom.domain.envelope.validation import ValidationMode

    if given["subject"] is None or given["durable"] is None:
        raise WrongUsage("Say what to ingest: --config FILE, or --subject and --durable.")
    if namespace is not None:
        raise WrongUsage("--namespace chooses one of a file; add --config FILE, or leave it out.")
    nats = session.settings.section("nats", NatsSettings, {"url": given["url"]})
    mailbox = session.settings.mailbox or ARCHIVE_MAILBOX
    return Namespace(
        name=mailbox.partition("@")[0],
        description=None,
        mailbox=mailbox,
        store=session.store,
        source=NatsSource(
            url=nats.url,
            subject=given["subject"],
            consumer_group=given["durable"],
            stream=given["stream"],
            credentials=nats.credentials,
            dead_letter_subject=given["dlq"],
        ),
        envelope_validation=ValidationMode.STRICT,
        payload_schemas=(),
        batch_size=100,
        max_retries=3,
        history_retention_ms=None,
        max_store_bytes=None,
    )


def _for_namespace(session: Session, namespace: "Namespace") -> Session:
    """Return a session whose store and limits are the namespace's."""
    settings = msgspec.structs.replace(
        session.settings, store=namespace.store, limits=namespace.limits(session.settings.limits)
    )
    return Session(session.command, settings, session.out)


async def _run(session: Session, namespace: "Namespace", postroom: "Postroom", once: bool) -> None:
    from postroom.adapters.compose.ingest import open_ingester

    out = session.out
    report = _reporter(session)
    async with open_ingester(namespace, postroom) as ingester:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, ingester.stop)
        out.note(f"Ingesting into {namespace.mailbox} in {session.shown_store}.")
        counts = await ingester.run(idle_ms=ONCE_IDLE_MS if once else None, report=report)
    report(counts)


def _reporter(session: Session) -> "Callable[[Ingested], None]":
    """Return what shows counts: a JSON object a line for machines, else a line for people."""
    out, began = session.out, time.monotonic()

    def report(counts: "Ingested") -> None:
        seconds = time.monotonic() - began
        if out.as_json:
            out.json(msgspec.structs.asdict(counts) | {"seconds": round(seconds, 3)})
        else:
            out.line(
                f"{counts.received:,} received, {counts.stored:,} stored, {counts.duplicates:,} known "
                f"already, {counts.skipped:,} skipped, {counts.dead_lettered:,} dead-lettered, "
                f"{counts.set_aside:,} set aside; {counts.received / seconds:,.0f}/s"
            )
        out.flush()

    return report
