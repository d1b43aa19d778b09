"""`postroom searches`: the saved searches of a mailbox, which the console shows, too."""

from typing import TYPE_CHECKING, Annotated

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import From
from postroom.adapters.cli.output import Prose, Time
from postroom.adapters.cli.remote import read_reports, use_mailbox
from postroom.adapters.cli.search import show_results
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage
from postroom.domain.errors import NotFound
from postroom.domain.names import describe_choices

if TYPE_CHECKING:
    from postroom.application.reports import SearchReport

Search = Annotated[str, Argument(metavar="NAME|ID", help="Name of the search, or its id.")]


async def list_searches(session: Session) -> None:
    """List the saved searches of a mailbox."""
    _, reports = await _read(session)
    session.out.records(
        {"searches": reports},
        ("search", "query", "saved by", "age"),
        reports,
        lambda each: (each.name, Prose(each.query or "all messages"), each.principal, Time(each.saved_at)),
    )


async def save(
    session: Session,
    name: Annotated[str, Argument(help="Name of the search, up to 80 characters.")],
    query: Annotated[str, Argument(help="URL of the console's search page, or only its query string.")],
    replace: Annotated[bool, Option("--replace", help="Replace a search of this name.")] = False,
) -> None:
    """Save a search for all who may search its topics.

    Example: postroom searches save 'Failed orders' 'topics=orders.*&statuses=dead'
    """
    text = query.partition("?")[2] if "?" in query else query
    async with use_mailbox(session) as postroom:
        report = await postroom.save_search(name, text, replace=replace)
    session.out.result(report, f"The search {report.name} is saved.")


async def delete(session: Session, search: Search) -> None:
    """Delete a saved search."""
    async with use_mailbox(session) as postroom:
        report = _find(search, await postroom.list_searches())
        await postroom.delete_search(report.search_id)
    session.out.result({"search_id": report.search_id}, f"The search {report.name} is deleted.")


async def run(session: Session, search: Search, source: From = None) -> int | None:
    """Search the read models as a saved search does, one page; with --json, one JSON object a line.

    The columns and the moment of a saved search are for the console, and have no effect here.
    """
    from postroom.adapters.compose.queries import parse_saved_search

    mailbox, reports = await _read(session)
    criteria = parse_saved_search(_find(search, reports).query)
    return show_results(session, msgspec.structs.replace(criteria, mailbox=mailbox, envelopes=False), source)


async def _read(session: Session) -> "tuple[str, list[SearchReport]]":
    return await read_reports(session, lambda mailbox: mailbox.list_searches())


def _find(text: str, reports: "list[SearchReport]") -> "SearchReport":
    """Return the search with an id or a name; raise NotFound, or WrongUsage if several have the name."""
    matches = [each for each in reports if text in (each.search_id, each.name)]
    if not matches:
        names = sorted({each.name for each in reports})
        raise NotFound(f"There is no saved search {text}; {describe_choices(text, names)}")
    if len(matches) > 1:
        ids = ", ".join(f"{each.search_id} ({each.query})" for each in matches)
        raise WrongUsage(f"Several searches on other topics are named {text}; give the id of one: {ids}.")
    return matches[0]
