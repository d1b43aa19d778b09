"""`postroom ingest`: store the messages of a stream in an archive, and operate on its dead letters."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.dlq import DryRun, Row, report, show_dead_letters
from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.importer import Headers, Id, Key, Time, record_mapping
from postroom.adapters.cli.running import Reload, mailbox_settings, monitoring, opened, running
from postroom.adapters.cli.session import ARCHIVE_MAILBOX, Session
from postroom.adapters.cli.settings import InvalidSettings, Settings
from postroom.adapters.cli.values import MetricsPort, WrongUsage, readable
from postroom.application.extras import explain_missing_extra
from postroom.application.telemetry import logger
from postroom.application.text import pluralize
from postroom.domain.errors import InvalidRequest

if TYPE_CHECKING:
    from postroom.adapters.compose.ingest import (
        IngestCounts,
        IngestDeadLetter,
        IngestDeadLetterAdmin,
        Ingester,
        MessageSource,
        Namespace,
    )


def source_from_flags(session: Session, flags: dict[str, str | None]) -> "MessageSource":
    """Return the source that the flags name.

    Raises: WrongUsage when one is missing, or does not fit the URL.
    """
    from postroom.adapters.compose.ingest import (
        KafkaSource,
        NatsSettings,
        NatsSource,
        RabbitmqSource,
        RedisSource,
    )

    kinds: dict[str, tuple[type[MessageSource], str, str]] = {  # settings of input and dead letters
        **dict.fromkeys(("redis", "rediss", "unix"), (RedisSource, "stream", "dead_letter_stream")),
        **dict.fromkeys(("kafka", "kafka+ssl"), (KafkaSource, "topic", "dead_letter_topic")),
        **dict.fromkeys(("amqp", "amqps"), (RabbitmqSource, "queue", "dead_letter_routing_key")),
    }
    url, subject, group = flags["url"] or "", flags["subject"], flags["durable"]
    scheme = url.partition("://")[0]
    if subject is None or group is None:
        raise WrongUsage("Name the stream to ingest: --config FILE, or --subject and --durable.")
    if scheme not in kinds:
        nats = session.settings.section("nats", NatsSettings, {"url": flags["url"]})
        values: dict[str, Any] = {"url": nats.url, "subject": subject, "stream": flags["stream"]}
        values |= {"consumer_group": group, "dead_letter_subject": flags["dlq"]} | nats.access()
        return msgspec.convert(values, NatsSource)
    if flags["stream"] is not None:
        raise WrongUsage(f"--stream is for NATS; name what to ingest from {scheme}:// by --subject.")
    kind, name, dead_letters = kinds[scheme]
    values = {"url": url, name: subject, "consumer_group": group, dead_letters: flags["dlq"]}
    return msgspec.convert({"field": "data"} | values if kind is RedisSource else values, kind)


_EXTRAS = {
    **dict.fromkeys(("amqp", "amqps"), "rabbitmq"),
    **dict.fromkeys(("kafka", "kafka+ssl"), "kafka"),
    **dict.fromkeys(("redis", "rediss", "unix"), "redis"),
}
"""Extra by the scheme of the source's URL; `nats` for all others."""
ONCE_IDLE_MS = 1_000

NamespaceName = Annotated[
    str | None, Option("--namespace", metavar="NAME", help="Namespace to use if the file defines several.")
]


async def ingest(
    session: Session,
    config: Annotated[
        str | None, Option("--config", metavar="FILE", help="Namespace file (YAML, RFC-037).")
    ] = None,
    namespace: NamespaceName = None,
    url: Annotated[
        str | None,
        Option(
            metavar="URL",
            help="URL without --config: nats://, kafka[+ssl]://, amqp[s]:// or redis[s]://. [nats.url]",
        ),
    ] = None,
    subject: Annotated[
        str | None,
        Option(
            metavar="SUBJECT", help="Subject (* and > are wildcards), Kafka topic, queue or Redis stream."
        ),
    ] = None,
    durable: Annotated[
        str | None,
        Option(metavar="NAME", help="Durable consumer or consumer group; created if missing."),
    ] = None,
    stream: Annotated[
        str | None,
        Option(metavar="NAME", help="NATS stream; default: the one that has the subject."),
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
            report = _reporter(session)
            async with running(session, ingester.stop, reloads):
                session.out.note(f"Ingesting into {definition.mailbox} in {session.shown_store}.")
                counts = await ingester.run(idle_ms=ONCE_IDLE_MS if once else None, report=report)
            report(counts)


def _from_file(config: str, name: str | None) -> "Namespace":
    from postroom.adapters.compose.ingest import find_namespace, load_namespaces

    try:
        return find_namespace(load_namespaces(config), name)
    except InvalidRequest as error:
        raise InvalidSettings(str(error)) from error


def _from_flags(session: Session, namespace: str | None, flags: dict[str, str | None]) -> "Namespace":
    scheme = (flags["url"] or "").partition("://")[0]
    with explain_missing_extra(_EXTRAS.get(scheme, "nats")):
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


Config = Annotated[
    str | None, Option("--config", metavar="FILE", help="Namespace file with the dead-letter subject.")
]
Subject = Annotated[
    str | None, Option("--dlq", metavar="SUBJECT", help="Dead-letter subject or stream, without --config.")
]
Url = Annotated[
    str | None, Option("--url", metavar="URL", help="URL of NATS or Redis, without --config. [nats.url]")
]
NUMBERS = Argument(metavar="NUMBER...", help="Numbers of dead letters, as in the list.")
Limit = Annotated[
    int, Option("--limit", min=1, max=10_000, help="Maximum number of dead letters, oldest first.")
]


@asynccontextmanager
async def open_admin(
    session: Session,
    config: Config = None,
    namespace: NamespaceName = None,
    subject: Subject = None,
    url: Url = None,
) -> AsyncIterator["IngestDeadLetterAdmin"]:
    """Open the dead letters of a subject, or of the namespace in a file."""
    scheme = (url or "").partition("://")[0]
    with explain_missing_extra(_EXTRAS.get(scheme, "nats")):
        from postroom.adapters.compose.ingest import has_dead_letters, open_ingest_dead_letters

    if config is None:
        if subject is None:
            raise WrongUsage("Name the dead-letter subject: --dlq SUBJECT, or --config FILE.")
        flags = {"url": url, "subject": subject, "durable": "dlq", "stream": None, "dlq": subject}
        source = source_from_flags(session, flags)
    else:
        if subject is not None or url is not None:
            raise WrongUsage(f"The file {config} names subject and server; omit --dlq and --url.")
        from postroom.adapters.compose.ingest import find_namespace, load_namespaces

        source = find_namespace(load_namespaces(config), namespace).source
    if not has_dead_letters(source):
        raise WrongUsage(
            f"The namespace in {config} has no dead letters that can be read one by one: name a "
            "dead_letter_subject of NATS or a dead_letter_stream of Redis; for Kafka and RabbitMQ, use their "
            "tools."
            if config is not None
            else f"{scheme}:// has no dead letters that can be read one by one; use the tools of the broker."
        )
    async with open_ingest_dead_letters(source) as admin:
        yield admin


Opening = AbstractAsyncContextManager["IngestDeadLetterAdmin"]
takes_admin = takes(open_admin)
"""Adds the options of `open_admin` to a command, which enters the context that it returns."""


@takes_admin
async def list_dead_letters(session: Session, opening: Opening, limit: Limit = 100) -> None:
    """List messages that could not be stored, in the order of their original stream."""
    async with opening as admin:
        _show_list(session, await admin.list(limit))


@takes_admin
async def show_dead_letter(
    session: Session,
    opening: Opening,
    number: Annotated[str, Argument(metavar="NUMBER", help="Number of the dead letter, as in the list.")],
    payload: Annotated[bool, Option("--payload", help="Write only the message, byte for byte.")] = False,
) -> None:
    """Show a dead letter: why it was not stored, its headers and its bytes."""
    async with opening as admin:
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


@takes_admin
async def redrive(
    session: Session,
    opening: Opening,
    numbers: Annotated[list[str] | None, NUMBERS] = None,
    limit: Limit = 100,
    dry_run: DryRun = False,
) -> None:
    """Publish dead letters, by default all, to their original subjects again, in their original order.

    The ingester and every other consumer of the stream receive them like new messages. One that can't be
    stored again becomes a new dead letter.
    """
    count = 0
    async with opening as admin:
        letters = await admin.find(*numbers) if numbers else await admin.list(limit)
        if dry_run:
            _show_list(session, letters)
            return
        try:
            async for _ in admin.redrive(letters):
                count += 1
        finally:
            report(session, "redriven", count)


@takes_admin
async def discard(session: Session, opening: Opening, numbers: Annotated[list[str], NUMBERS]) -> None:
    """Remove dead letters permanently."""
    async with opening as admin:
        letters = await admin.find(*numbers)
        await admin.discard(letters)
    report(session, "discarded", len(letters))


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
    show_dead_letters(
        session,
        letters,
        lambda each: Row(each.sequence, each.original_subject, each.reason, more=_more(each)),
        id_="number",
        origin="subject",
        as_json=_facts,
    )


def _more(letter: "IngestDeadLetter") -> dict[str, Any]:
    return {name: _facts(letter)[name] for name in ("sequence", "consumer", "bytes")}
