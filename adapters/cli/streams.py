"""`postroom streams`: what the settings file says of streams and consumers (SDS-047 section 10)."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer
from typer import Option

from postroom.adapters.cli.failures import DIFFERS, REFUSED
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings, unknown_key
from postroom.adapters.cli.values import WrongUsage, exact_duration, exact_size, parse_duration, parse_size
from postroom.domain.errors import InvalidRequest
from postroom.domain.streams import ConsumerDefinition, Definition, StreamDefinition, Value

if TYPE_CHECKING:
    from postroom.application.ports.streams import StreamStatus
    from postroom.application.streams import Plan

Kind = TypeVar("Kind", bound=msgspec.Struct)
_SIZES = ("max_bytes", "max_msg_size")
_WORKER_COUNTS = "server_max_deliver"

Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        metavar="N",
        help="Servers that hold each stream; 1 where there is only one. [streams.replicas]",
    ),
]
Nats = Annotated[str | None, Option("--nats", metavar="URL", help="Where NATS is. [nats.url]")]


async def apply(
    session: Session,
    yes: Annotated[bool, Option("--yes", "-y", help="Change without asking.")] = False,
    replicas: Replicas = None,
    nats: Nats = None,
) -> int:
    """Show how streams and consumers differ from their definitions, then make and change them.

    What isn't defined is never touched, and nothing is ever deleted.
    """
    from postroom.adapters.compose.streams import NatsSettings, open_streams
    from postroom.application.streams import apply as carry_out
    from postroom.application.streams import plan as make_plan

    definitions = read_definitions(session.settings, replicas)
    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        plan = await make_plan(streams, definitions)
        possible = not any(each.refused for each in plan.differences)
        if not session.out.as_json:
            _show(session, plan)
        if plan.differences and possible and not yes and not _agreed(session):
            session.out.note("Nothing was changed.")
            return REFUSED
        await carry_out(streams, plan)
    if session.out.as_json:
        session.out.json({"changed": plan.differences})
    elif plan.differences:
        session.out.line(f"{len(plan.steps)} changed: {', '.join(each.name for each, _ in plan.steps)}")
    return 0


async def diff(session: Session, replicas: Replicas = None, nats: Nats = None) -> int:
    """Show how streams and consumers differ from their definitions; exit with 6 where they do."""
    from postroom.adapters.compose.streams import NatsSettings, open_streams
    from postroom.application.streams import plan as make_plan

    definitions = read_definitions(session.settings, replicas)
    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        plan = await make_plan(streams, definitions)
    if session.out.as_json:
        session.out.json({"differences": plan.differences})
    else:
        _show(session, plan)
    return DIFFERS if plan.differences else 0


async def list_streams(session: Session, nats: Nats = None) -> None:
    """List the streams of the server, what they hold, and how far their consumers are."""
    from postroom.adapters.compose.streams import NatsSettings, open_streams

    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        found = await streams.list_streams()
    if session.out.as_json:
        session.out.json({"streams": found})
        return
    columns = ("stream", "consumer", "subjects", "messages", "size", "waiting", "unsettled", "redelivered")
    session.out.table(columns, [row for stream in found for row in _rows(stream)])


def read_definitions(settings: Settings, replicas: int | None = None) -> Sequence[Definition]:
    """Return the streams and consumers that the settings define.

    Arguments:
        replicas: of every stream, whatever its definition says; None takes `replicas` of `[streams]`, if any.

    Raises: InvalidSettings naming the table and key, or when nothing is defined.
    """
    streams, consumers = dict(settings.sections["streams"]), dict(settings.sections["consumers"])
    file = settings.file or "postroom.toml"
    wanted = streams.pop("replicas", None) if not isinstance(streams.get("replicas"), Mapping) else None
    override = replicas if replicas is not None else wanted
    definitions: list[Definition] = []
    for name, table in streams.items():
        fields = _fields(table, StreamDefinition, f"[streams.{name}] in {file}")
        if override is not None:
            fields["replicas"] = override
        definitions.append(_build(fields | {"name": name}, StreamDefinition, f"[streams.{name}] in {file}"))
    for name, table in consumers.items():
        definitions.append(consumer_definition(name, table, file))
    if not definitions:
        raise InvalidSettings(
            f"{file} defines no streams; add tables such as [streams.SEA_EVENTS], or begin with "
            "docs/examples/streams.toml."
        )
    return definitions


def consumer_definition(name: str, table: object, file: str) -> ConsumerDefinition:
    """Return the consumer that `[consumers.<name>]` defines; raise `InvalidSettings` naming what is wrong."""
    where = f"[consumers.{name}] in {file}"
    fields = _fields(table, ConsumerDefinition, where, ("filter_subject",))
    subject = fields.pop("filter_subject", None)
    if subject is not None:
        if "filter_subjects" in fields:
            raise InvalidSettings(f"{where} has both filter_subject and filter_subjects; keep one.")
        fields["filter_subjects"] = [subject]
    return _build({"durable": name} | fields, ConsumerDefinition, where)


def _fields(table: object, kind: type[Definition], where: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    if not isinstance(table, Mapping):
        raise InvalidSettings(f"{where} must be a table, not {table!r}.")
    known = {field.removesuffix("_ms"): field for field in (*kind.__struct_fields__, *more)}
    known = {key: field for key, field in known.items() if key not in ("name", _WORKER_COUNTS)}
    fields: dict[str, Any] = {}
    for key, value in table.items():
        field = known.get(key.removesuffix("_ms"))
        if field is None:
            raise InvalidSettings(f"{where} has no key {key!r}{unknown_key(key, tuple(known))}.")
        try:
            fields[field] = _measured(field, value)
        except WrongUsage as error:
            raise InvalidSettings(f"{where}: {key}: {error}") from None
    return fields


def _measured(field: str, value: object) -> object:
    if isinstance(value, str) and field.endswith("_ms"):
        return parse_duration(value)
    if isinstance(value, str) and field in _SIZES:
        return parse_size(value)
    return value


def _build(fields: Mapping[str, object], kind: type[Kind], where: str) -> Kind:
    try:
        return msgspec.convert(fields, kind, strict=False)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise InvalidSettings(f"{where}: {str(error).removesuffix('.')}.") from None


def _show(session: Session, plan: "Plan") -> None:
    if not plan.differences:
        session.out.line("Everything is as defined.")
        return
    rows = [
        (
            {"create": "+", "update": "~"}[each.action] if not each.refused else "!",
            each.kind,
            each.name,
            each.field.removesuffix("_ms"),
            "" if each.action == "create" else written(each.field, each.is_),
            written(each.field, each.becomes),
            each.refused or each.note,
        )
        for each in plan.differences
    ]
    session.out.table(("", "what", "name", "field", "is", "becomes", "note"), rows)


def written(field: str, value: Value) -> str:
    """Return a field's value as the settings file would say it."""
    if value is None:
        return "unlimited"
    if isinstance(value, tuple):
        return ", ".join(value) or "all"
    if isinstance(value, str):
        return value
    if field.endswith("_ms"):
        return exact_duration(value)
    return exact_size(value) if field in _SIZES else str(value)


def _agreed(session: Session) -> bool:
    if session.out.as_json or not sys.stdin.isatty():
        raise InvalidRequest("Nobody can be asked here; look at postroom streams diff, then add --yes.")
    return typer.confirm("Change this?", err=True)


def _rows(stream: "StreamStatus") -> list[tuple[object, ...]]:
    subjects = ", ".join(stream.subjects)
    size = f"{stream.bytes / 1e6:,.1f} MB"
    first = (stream.name, None, subjects, stream.messages, size, None, None, None)
    return [
        first,
        *(
            (stream.name, each.durable, None, None, None, each.waiting, each.unsettled, each.redelivered)
            for each in stream.consumers
        ),
    ]
