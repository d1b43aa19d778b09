"""`postroom ingest`: store the messages of a stream in an archive."""

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Option

from postroom.adapters.cli.mapping import Headers, Id, Key, Time, record_mapping
from postroom.adapters.cli.monitoring import MetricsPort, monitoring
from postroom.adapters.cli.running import Reload, mailbox_settings, opened, running
from postroom.adapters.cli.session import ARCHIVE_MAILBOX, Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import WrongUsage
from postroom.application.extras import explain_missing_extra
from postroom.application.pluralize import pluralize
from postroom.application.telemetry import logger
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.compose.ingest import IngestCounts, Ingester, Namespace

_EXTRAS = {
    "amqp": "rabbitmq",
    "amqps": "rabbitmq",
    "kafka": "kafka",
    "kafka+ssl": "kafka",
    "redis": "redis",
    "rediss": "redis",
    "unix": "redis",
}
"""Extra by the scheme of the source's URL; `nats` for all others."""
ONCE_IDLE_MS = 1_000


async def ingest(
    session: Session,
    config: Annotated[
        str | None,
        Option("--config", metavar="FILE", help="Namespace file (YAML, RFC-037)."),
    ] = None,
    namespace: Annotated[
        str | None,
        Option("--namespace", metavar="NAME", help="Namespace to use if the file defines several."),
    ] = None,
    url: Annotated[
        str | None,
        Option(
            "--url",
            metavar="URL",
            help="URL without --config: nats://, kafka[+ssl]://, amqp[s]:// or redis[s]://. [nats.url]",
        ),
    ] = None,
    subject: Annotated[
        str | None,
        Option(
            "--subject",
            metavar="SUBJECT",
            help="Subject (* and > are wildcards), Kafka topic, queue or Redis stream.",
        ),
    ] = None,
    durable: Annotated[
        str | None,
        Option("--durable", metavar="NAME", help="Durable consumer or consumer group; created if missing."),
    ] = None,
    stream: Annotated[
        str | None,
        Option("--stream", metavar="NAME", help="NATS stream; default: the one that has the subject."),
    ] = None,
    topic: Annotated[
        str | None,
        Option(
            metavar="TEMPLATE",
            help="Read messages as any JSON, text or bytes and store them with this topic, such as "
            "github.{event}.{action}; segments whose field is null or missing are left out.",
        ),
    ] = None,
    header: Headers = None,
    key: Key = None,
    time_: Time = None,
    id_: Id = None,
    dead_letters: Annotated[
        str | None,
        Option(
            "--dlq",
            metavar="SUBJECT",
            help="Subject, topic, queue or stream for messages that can't be stored; default: skip them.",
        ),
    ] = None,
    once: Annotated[bool, Option("--once", help="Exit when no message has arrived for a second.")] = False,
    metrics_port: MetricsPort = None,
) -> None:
    """Store the messages of a stream in an archive, each exactly once, until interrupted.

    They are CloudEvents, PrismEnvelopes or, with --topic, any JSON, text or bytes.

    A message is acknowledged after it is durable in the log, so a crash of any process loses none.
    A settings file is named before the command: postroom --config postroom.toml ingest.
    """
    flags = {"url": url, "subject": subject, "durable": durable, "stream": stream, "dlq": dead_letters}
    if config is not None:
        if conflicts := [f"--{name}" for name, value in flags.items() if value is not None]:
            raise WrongUsage(f"{', '.join(conflicts)} and --config exclude each other; omit one.")
        definition = _from_file(config, namespace)
    else:
        definition = _from_flags(session, namespace, flags)
    mapping = record_mapping(topic, header or [], key, time_, id_)
    definition = msgspec.structs.replace(definition, mapping=mapping)
    from postroom.adapters.compose.ingest import open_namespace

    session = _for_namespace(session, definition)
    # Connect to the source first, so that no store is created if it is unreachable.
    async with (
        opened(lambda: open_namespace(definition), is_patient=not once) as source,
        opened(
            lambda: session.use(definition.mailbox, create=True, mode="archive"), is_patient=not once
        ) as postroom,
    ):
        ingester = source.ingester(postroom)
        reloads = [mailbox_settings(session, postroom)]
        if config is not None:
            reloads.append(_namespace_file(ingester, definition, config))
        with monitoring(session, metrics_port, source.monitor(ingester, postroom)):
            await _run(session, definition.mailbox, ingester, reloads, once)


def _from_file(config: str, name: str | None) -> "Namespace":
    from postroom.adapters.compose.ingest import find_namespace, load_namespaces

    try:
        return find_namespace(load_namespaces(config), name)
    except InvalidRequest as error:
        raise InvalidSettings(str(error)) from error


def _from_flags(session: Session, namespace: str | None, flags: dict[str, str | None]) -> "Namespace":
    scheme = (flags["url"] or "").partition("://")[0]
    with explain_missing_extra(_EXTRAS.get(scheme, "nats")):
        from postroom.adapters.cli.ingest_source import source_from_flags
        from postroom.adapters.compose.ingest import Namespace
    from postroom.domain.envelope.validation import ValidationMode

    source = source_from_flags(session, flags)
    if namespace is not None:
        raise WrongUsage("--namespace needs --config FILE.")
    mailbox = session.settings.mailbox or ARCHIVE_MAILBOX
    return Namespace(
        name=mailbox.partition("@")[0],
        description=None,
        mailbox=mailbox,
        store=session.store,
        source=source,
        envelope_validation=ValidationMode.STRICT,
        payload_schemas=(),
        batch_size=500,
        max_retries=3,
        history_retention_ms=None,
        max_store_bytes=None,
    )


def _for_namespace(session: Session, namespace: "Namespace") -> Session:
    """Return a session with the store and limits of the namespace."""
    settings = session.settings
    limits = msgspec.structs.replace(settings.limits, **namespace.limits)
    sources = {**settings.sources, **{f"limits.{name}": namespace.name for name in namespace.limits}}
    return session.with_settings(
        msgspec.structs.replace(settings, store=namespace.store, limits=limits, sources=sources)
    )


def _namespace_file(ingester: "Ingester", definition: "Namespace", file: str) -> Reload:
    """Return the reload of a namespace file: how messages are validated, and batches are stored."""
    from postroom.adapters.compose.ingest import RELOADED, reload_namespace

    async def apply(settings: Settings) -> None:
        changed = await asyncio.to_thread(_from_file, file, definition.name)
        changed = msgspec.structs.replace(changed, mapping=definition.mapping)
        await asyncio.to_thread(reload_namespace, ingester, changed)
        names = [name for name in definition.__struct_fields__ if name not in RELOADED]
        if later := [name for name in names if getattr(changed, name) != getattr(definition, name)]:
            logger().warning("settings.restart_needed", file=file, settings=", ".join(later))

    return Reload("namespace file", apply)


async def _run(
    session: Session, mailbox: str, ingester: "Ingester", reloads: list[Reload], once: bool
) -> None:
    report = _reporter(session)
    session.out.note(f"Ingesting into {mailbox} in {session.shown_store}.")
    async with running(session, ingester.stop, reloads):
        counts = await ingester.run(idle_ms=ONCE_IDLE_MS if once else None, report=report)
    report(counts)


def _reporter(session: Session) -> "Callable[[IngestCounts], None]":
    """Return a function that writes counts as a line of JSON or text."""
    out, start = session.out, time.monotonic()

    def report(counts: "IngestCounts") -> None:
        seconds = time.monotonic() - start
        out.result(
            msgspec.structs.asdict(counts) | {"seconds": round(seconds, 3)},
            f"{counts.received:,} received, {counts.stored:,} stored, "
            f"{pluralize(counts.duplicates, 'duplicate')}, "
            f"{counts.skipped:,} skipped, {counts.dead_lettered:,} dead-lettered, "
            f"{counts.deferred:,} deferred; {counts.received / seconds:,.0f}/s",
        )
        out.flush()

    return report
