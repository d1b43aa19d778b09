"""Options that several commands have: filters of searches, and settings of one section."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_pairs, parse_time

if TYPE_CHECKING:
    from postroom.adapters.cli.settings import Settings
    from postroom.domain.search import EventFilter

Section = TypeVar("Section", bound=msgspec.Struct)
Answer = TypeVar("Answer")
"""The exit code of a command, or None; for an asynchronous command, the coroutine that returns it."""


From = Annotated[
    str | None,
    Option("--from", metavar="TARGET", help="Read models in clickhouse: or chdb: instead of the store's."),
]


Cursor = Annotated[str | None, Option(help="Continue after the page that printed this cursor.")]


def search_filter(
    session: Session,
    text: Annotated[
        str | None, Argument(help="Substrings that must all occur in headers, as in 'smith 0f3a'.")
    ] = None,
    match: Annotated[
        str | None,
        Option(
            metavar="'WORD WOR*'",
            help="Words or prefixes that must all occur in headers or in searched bodies. [search.bodies]",
        ),
    ] = None,
    topic: Annotated[
        list[str] | None, Option(help="Topic or glob such as admin.users.*; may be repeated.")
    ] = None,
    principal: Annotated[list[str] | None, Option(help="Publisher; may be repeated.")] = None,
    status: Annotated[
        list[str] | None, Option(help="ready, in_flight, acked, dead, expired or archived; may be repeated.")
    ] = None,
    since: Annotated[
        str | None,
        Option(metavar="TIME", help="Published at or after: RFC 3339, ms since 1970, or an age such as 2h."),
    ] = None,
    until: Annotated[
        str | None, Option(metavar="TIME", help="Published at or before, in the same format.")
    ] = None,
    id_: Annotated[str | None, Option("--id", help="Message id.")] = None,
    correlation_id: Annotated[str | None, Option(help="Correlation id.")] = None,
    trace_id: Annotated[str | None, Option(help="Trace id.")] = None,
    namespace: Annotated[str | None, Option(help="Namespace.")] = None,
    header: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")
    ] = None,
) -> "EventFilter":
    """Return the filter that the options of a command describe."""
    from postroom.domain.search import EventFilter, parse_status

    now = datetime.now(UTC)
    return EventFilter(
        start_time=None if since is None else parse_time(since, now),
        end_time=None if until is None else parse_time(until, now),
        topics=tuple(topic or ()),
        principals=tuple(principal or ()),
        statuses=tuple(map(parse_status, status or ())),
        message_id=id_,
        correlation_id=correlation_id,
        trace_id=trace_id,
        namespace=namespace,
        mailbox=session.settings.mailbox,
        headers=parse_pairs(header or (), "--header"),
        text=text,
        match=match,
    )


def takes(source: Callable[..., Any]) -> Callable[[Callable[..., Answer]], Callable[..., Answer]]:
    """Return a decorator that adds the options of `source` to a command and passes its result on to it.

    Arguments:
        source: function of the session and the options.
    """
    options = list(signature(source).parameters.values())[1:]

    def add(command: Callable[..., Answer]) -> Callable[..., Answer]:
        session, _, *own = signature(command).parameters.values()

        @wraps(command)
        def run(session: Session, **arguments: Any) -> Answer:
            shared = {each.name: arguments.pop(each.name) for each in options if each.name in arguments}
            return command(session, source(session, **shared), **arguments)

        required = [each for each in own if each.default is each.empty]  # Python requires them to be first
        optional = [each for each in own if each.default is not each.empty]
        run.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
            parameters=[session, *required, *options, *optional]
        )
        return run

    return add


takes_filter = takes(search_filter)
"""Adds the options of `search_filter` to a command."""


class SectionFlags(NamedTuple, Generic[Section]):
    """Options of a command that are settings of a section.

    Arguments:
        flags: their values by field; None for omitted ones.
    """

    section: str
    kind: type[Section]
    flags: dict[str, Any]

    def read(self, settings: "Settings") -> Section:
        """Return the section in which the options take precedence; see `Settings.section`."""
        return settings.section(self.section, self.kind, self.flags)


def takes_section(
    section: str, kind: type[Section], **options: Any
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Return a decorator that adds options to a command, which is called with their `SectionFlags`.

    Arguments:
        options: by field of `kind`, which has their types and defaults. The help text gets the default.
    """
    fields = {each.name: each for each in msgspec.structs.fields(kind)}
    parameters = [Parameter("session", Parameter.POSITIONAL_OR_KEYWORD, annotation=Session)]
    names = {}
    for name, option in options.items():
        field = fields[name]
        if isinstance(field.default, str | int) and not isinstance(field.default, bool):
            shown = f"{field.default:,}" if isinstance(field.default, int) else field.default
            option.help = f"{option.help.removesuffix('.')}; default {shown}."
        is_list = field.default == ()
        hint: Any = bool if field.default is False else list[str] | None if is_list else field.type | None
        # Typer stores the first name of an option as its default.
        flag = (
            option.default if isinstance(option.default, str) else next(iter(option.param_decls or ()), name)
        )
        declared = flag.partition("/")[0].strip("-").replace("-", "_")
        names[declared] = name
        default = False if hint is bool else None
        parameters.append(
            Parameter(
                declared, Parameter.POSITIONAL_OR_KEYWORD, annotation=Annotated[hint, option], default=default
            )
        )

    def read(session: Session, **values: Any) -> SectionFlags[Section]:
        return SectionFlags(section, kind, {names[each]: value or None for each, value in values.items()})

    read.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return takes(read)
