"""Search options, shared by every command that selects messages."""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_pairs, parse_time

if TYPE_CHECKING:
    from postroom.domain.search import EventFilter


From = Annotated[
    str | None,
    Option("--from", metavar="TARGET", help="Read models in clickhouse: or chdb: instead of the store's."),
]


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


def takes(source: Callable[..., Any]) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Return a decorator that adds the options of a function to a command, which is called with its result.

    Arguments:
        source: takes the session and options.
    """
    options = list(signature(source).parameters.values())[1:]

    def add(command: Callable[..., int | None]) -> Callable[..., int | None]:
        session, _, *own = signature(command).parameters.values()

        @wraps(command)
        def run(session: Session, **arguments: Any) -> int | None:
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
