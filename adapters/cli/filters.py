"""The options that say which messages are meant, the same for every command that searches."""

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


def search_filter(
    session: Session,
    text: Annotated[
        str | None, Argument(help="Parts of text that must all occur in some header, as in 'smith 0f3a'.")
    ] = None,
    match: Annotated[
        str | None,
        Option(
            metavar="'WORD WOR*'",
            help="Whole words, or their beginnings, that must all occur in headers or in opted-in bodies.",
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
        str | None, Option(metavar="TIME", help="Not before: RFC 3339, ms, or an age like 2h.")
    ] = None,
    until: Annotated[str | None, Option(metavar="TIME", help="Not after, the same way.")] = None,
    id_: Annotated[str | None, Option("--id", help="Message id.")] = None,
    correlation_id: Annotated[str | None, Option()] = None,
    trace_id: Annotated[str | None, Option()] = None,
    namespace: Annotated[str | None, Option()] = None,
    header: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")
    ] = None,
) -> "EventFilter":
    """Return the filter that a command's options spell."""
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


def takes_filter(command: Callable[..., int | None]) -> Callable[..., int | None]:
    """Give a command the options of `search_filter`, and call it with the filter that they spell."""
    options = list(signature(search_filter).parameters.values())[1:]
    session, _, *own = signature(command).parameters.values()

    @wraps(command)
    def run(session: Session, **given: Any) -> int | None:
        spelled = {option.name: given.pop(option.name) for option in options if option.name in given}
        wanted = search_filter(session, **spelled)
        return command(session, wanted, **given)

    arguments = [each for each in own if each.default is each.empty]  # Python wants those first
    others = [each for each in own if each.default is not each.empty]
    run.__signature__ = signature(command).replace(  # type: ignore[attr-defined]
        parameters=[session, *arguments, *options, *others]
    )
    return run
