"""`postroom streams`: streams and consumers of the settings file, compared and applied."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, Settings, unknown_key
from postroom.adapters.cli.values import (
    DIFFERS,
    REFUSED,
    Nats,
    WrongUsage,
    exact_duration,
    exact_size,
    parse_duration,
    parse_size,
)
from postroom.adapters.compose.brokers import (
    ConsumerDefinition,
    Definition,
    NatsSettings,
    Plan,
    StreamDefinition,
    StreamStatus,
    Value,
    apply_plan,
    make_plan,
    open_streams,
)
from postroom.domain.errors import InvalidRequest

Kind = TypeVar("Kind", bound=msgspec.Struct)
_SIZES = ("max_bytes", "max_msg_size")
_SERVER_LIMIT = "server_max_deliver"

Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        metavar="N",
        help="Number of servers that store each stream. [streams.replicas]",
    ),
]


async def apply(
    session: Session,
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    replicas: Replicas = None,
    nats: Nats = None,
) -> int:
    """Show how streams and consumers differ from their definitions, then create and update them.

    Streams and consumers without a definition are never changed, and nothing is ever deleted.
    """
    definitions = read_definitions(session.settings, replicas)
    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        plan = await make_plan(streams, definitions)
        can_apply = not any(each.refusal for each in plan.differences)
        if not session.out.as_json:
            _show(session, plan)
        if plan.differences and can_apply and not yes:
            refusal = InvalidRequest(
                "This needs confirmation; check with postroom streams diff, then add --yes."
            )
            if not session.out.confirm("Apply these changes?", refusal):
                session.out.note("Nothing was changed.")
                return REFUSED
        await apply_plan(streams, plan)
    if session.out.as_json:
        session.out.json({"changed": plan.differences})
    elif plan.differences:
        session.out.prose(f"{len(plan.steps)} changed: {', '.join(each.name for each, _ in plan.steps)}")
    return 0


async def diff(session: Session, replicas: Replicas = None, nats: Nats = None) -> int:
    """Show how streams and consumers differ from their definitions; exit with code 6 if they do."""
    definitions = read_definitions(session.settings, replicas)
    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        plan = await make_plan(streams, definitions)
    if session.out.as_json:
        session.out.json({"differences": plan.differences})
    else:
        _show(session, plan)
    return DIFFERS if plan.differences else 0


async def list_streams(session: Session, nats: Nats = None) -> None:
    """List the streams of the server with their sizes, and the progress of their consumers."""
    async with open_streams(session.settings.section("nats", NatsSettings, {"url": nats})) as streams:
        statuses = await streams.list_streams()
    if session.out.as_json:
        session.out.json({"streams": statuses})
        return
    columns = ("stream", "consumer", "subjects", "messages", "size", "waiting", "unsettled", "redelivered")
    session.out.table(
        columns, [row for stream in statuses for row in _rows(stream)], only_wide=("redelivered",)
    )


def read_definitions(settings: Settings, replicas: int | None = None) -> Sequence[Definition]:
    """Return the streams and consumers that the settings define.

    Arguments:
        replicas: overrides the replicas of every definition; None takes `replicas` of `[streams]`, if any.

    Raises: InvalidSettings naming the table and key, or if nothing is defined.
    """
    streams, consumers = dict(settings.sections["streams"]), dict(settings.sections["consumers"])
    file = settings.file or "postroom.toml"
    default = streams.pop("replicas", None) if not isinstance(streams.get("replicas"), Mapping) else None
    override = replicas if replicas is not None else default
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
            f"{file} defines no streams; add tables such as [streams.SEA_EVENTS], as in "
            "docs/examples/streams.toml."
        )
    return definitions


def consumer_definition(name: str, table: object, file: str) -> ConsumerDefinition:
    """Return the consumer that `[consumers.<name>]` defines; raise `InvalidSettings` if it is invalid."""
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
    names = {field.removesuffix("_ms"): field for field in (*kind.__struct_fields__, *more)}
    names = {key: field for key, field in names.items() if key not in ("name", _SERVER_LIMIT)}
    fields: dict[str, Any] = {}
    for key, value in table.items():
        field = names.get(key.removesuffix("_ms"))
        if field is None:
            raise InvalidSettings(f"{where} has no key {key!r}{unknown_key(key, tuple(names))}")
        if field in fields:
            other = next(each for each in table if names.get(each.removesuffix("_ms")) == field)
            raise InvalidSettings(f"{where}: {other} and {key} are the same setting; keep one.")
        try:
            fields[field] = _parse_value(field, value)
        except WrongUsage as error:
            raise InvalidSettings(f"{where}: {key}: {error}") from None
    return fields


def _parse_value(field: str, value: object) -> object:
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


def _show(session: Session, plan: Plan) -> None:
    if not plan.differences:
        session.out.line("Streams and consumers match their definitions.")
        return
    from postroom.adapters.cli.output import Prose

    rows = [
        (
            {"create": "+", "update": "~"}[each.action] if not each.refusal else "!",
            each.kind,
            each.name,
            each.field.removesuffix("_ms"),
            "" if each.action == "create" else format_value(each.field, each.current),
            format_value(each.field, each.desired),
            Prose(each.refusal or each.note or ""),
        )
        for each in plan.differences
    ]
    session.out.table(("", "what", "name", "field", "current", "desired", "note"), rows)


def format_value(field: str, value: Value) -> str:
    """Return a field's value in the format of the settings file."""
    if value is None:
        return "unlimited"
    if isinstance(value, tuple):
        return ", ".join(value) or "all"
    if isinstance(value, str):
        return value
    if field.endswith("_ms"):
        return exact_duration(value)
    return exact_size(value) if field in _SIZES else str(value)


def _rows(stream: StreamStatus) -> list[tuple[object, ...]]:
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
