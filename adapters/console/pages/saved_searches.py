"""Saved searches: their list, and forms that save and delete them."""

from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlencode

from starlette.responses import Response

from postroom.adapters.console.event_filter import (
    AT,
    COLUMN,
    KEPT,
    PARAMETERS,
    group_values,
    parse_columns,
    parse_filter,
)
from postroom.adapters.console.page import Page, parse_moment, route
from postroom.application.masking import NO_MASK
from postroom.application.reports import SearchReport
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, IdempotencyConflict, InvalidRequest, NotFound


class SavedLink(NamedTuple):
    """A saved search, with its link."""

    search: SearchReport
    href: str


async def show(page: Page) -> Response:
    """Show the saved searches, and the form that saves the query of the URL."""
    may_save = page.may(Right.REDRIVE)
    return await page.render(
        "saved_searches/list",
        saved=await _list_saved(page),
        may_save=may_save,
        query=page.query.get("query") if may_save else None,
    )


async def _list_saved(page: Page) -> list[SavedLink]:
    """Return the saved searches that the caller may run."""
    searches = await page.mailbox.list_searches()
    return [SavedLink(each, _href(page, each.query)) for each in searches if _may_run(page, each.query)]


async def save(page: Page) -> Response:
    """Save the search of the page; if another query has its name, ask whether to replace that query."""
    name, query = page.field("name").strip(), page.field("query")
    pairs = [(each, value) for each, value in parse_qsl(query) if each in (*PARAMETERS, *KEPT)]
    _check(page, pairs)
    query = urlencode(pairs)
    try:
        await page.mailbox.save_search(name, query, replace=page.field("replace") == "1")
    except IdempotencyConflict as error:
        return await page.render("saved_searches/replace", 409, error=error, name=name, query=query)
    return page.redirect("/search", f"The search {name} is saved.", **group_values(pairs))


async def confirm(page: Page) -> Response:
    """Ask whether to delete a search."""
    return await page.render("saved_searches/delete", saved=await _find(page))


async def delete(page: Page) -> Response:
    """Delete a search."""
    name = page.field("name")
    await page.mailbox.delete_search(page.path["search_id"])
    return page.redirect("/searches", f"The search {name} is deleted." if name else "The search is deleted.")


async def _find(page: Page) -> SavedLink:
    await page.check(Right.REDRIVE)
    for each in await _list_saved(page):
        if each.search.search_id == page.path["search_id"]:
            return each
    raise NotFound("There is no such saved search; it may have been deleted.")


def _may_run(page: Page, query: str) -> bool:
    """Return whether to show a search, whose values may be hidden from the caller."""
    try:
        filter_ = parse_filter(parse_qsl(query))
        page.mask.check_criteria(filter_)
    except Forbidden:
        return False
    except InvalidRequest:
        return page.mask == NO_MASK
    return filter_.match is None or page.may(Right.READ_PAYLOAD)


def _check(page: Page, pairs: list[tuple[str, str]]) -> None:
    """Raise InvalidRequest or Forbidden for a query that the search page would refuse."""
    page.mask.check_criteria(parse_filter(pairs))
    parse_columns(value for name, value in pairs if name == COLUMN)
    for name, value in pairs:
        if name == AT:
            parse_moment(value)


def _href(page: Page, query: str) -> str:
    return page.url("/search") + (f"?{query}" if query else "")


ROUTES: Final = [
    route("/searches", show, query=("query",)),
    route("/searches", save, method="POST"),
    route("/searches/{search_id}/delete", confirm),
    route("/searches/{search_id}/delete", delete, method="POST"),
]
