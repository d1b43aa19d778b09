"""Dead letters: groups with trends, and the dead letters of a group."""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar, cast

from starlette.responses import Response

from postroom.adapters.console.held_dead_letters import MAX_READ, group, page_of, read_held
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import MS, parse_time, split_lines, text_of, write_time
from postroom.application.access.search import read_dead_letters
from postroom.application.page import Page as ResultPage
from postroom.application.ports.dead_letters import (
    BARS,
    DEFAULT_GROUP,
    MAX_GROUPED,
    DeadLetter,
    DeadLetterFilter,
    DeadLetterGroup,
    DeadLetterGroupFilter,
    DeadLetterGroupPage,
    GroupField,
    GroupOrder,
)
from postroom.application.ports.read_models import ReadModels
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound

NAV: Final = NavEntry("Dead letters", "/dead-letters", 40, key="d")
PAGE_SIZE: Final = 50
FIELDS: Final = ("topics", "reason", "fingerprint", "since", "until", "text")
BY: Final[Mapping[str, tuple[GroupField, ...]]] = {
    "": DEFAULT_GROUP,
    "fingerprint": ("fingerprint",),
    "topic": ("topic",),
    "reason": ("reason",),
}
GROUPINGS: Final = (
    ("", "Error and topic"),
    ("fingerprint", "Error"),
    ("topic", "Topic"),
    ("reason", "Reason"),
)
Filter = TypeVar("Filter", DeadLetterFilter, DeadLetterGroupFilter)
Result = TypeVar("Result")
ORDERS: Final = (("latest", "Latest first"), ("largest", "Largest first"))


async def groups(page: Page) -> Response:
    """Show groups of dead letters."""
    values = _values(page) | {name: page.query.get(name, "") for name in ("by", "order")}
    by = BY.get(values["by"])
    if by is None:
        raise InvalidRequest(f"Unknown grouping {values['by'][:40]!r}; choose one from the list.")
    filter_ = DeadLetterGroupFilter(
        **_criteria(values),
        by=by,
        order=cast(GroupOrder, values["order"] or "latest"),
        bars=BARS,
        limit=PAGE_SIZE,
        cursor=page.query.get("cursor") or None,
    )
    result, lag, hint = await _read_groups(page, filter_)
    return await page.render(
        "dead_letters/groups",
        values=values,
        result=result,
        rows=[
            (each, _letters_link(page, values, each), _redrive_link(page, values, each))
            for each in result.items
        ],
        lag=lag,
        hint=hint,
        groupings=GROUPINGS,
        orders=ORDERS,
        most=MAX_GROUPED,
        next_page=_next(page, "/dead-letters", values, result.next_cursor),
    )


async def letters(page: Page) -> Response:
    """Show dead letters one by one, latest first."""
    values = _values(page)
    filter_ = DeadLetterFilter(**_criteria(values), limit=PAGE_SIZE, cursor=page.query.get("cursor") or None)
    lag, hint = 0, ""
    try:
        result, lag = await _read(
            page,
            filter_,
            lambda models: models.dead_letters,
            ResultPage[DeadLetter](()),
            lambda result: len(result.items),
            "dead_letters",
        )
    except NotFound:
        held, hint = await _read_held(page, filter_)
        result = page_of(held, filter_.limit, filter_.cursor)
    return await page.render(
        "dead_letters/letters",
        values=values,
        letters=[(each, _redrive_one(page, each)) for each in result.items],
        redrive=_redrive_link(page, values),
        lag=lag,
        hint=hint,
        next_page=_next(page, "/dead-letters/letters", values, result.next_cursor),
    )


async def read_groups_of(page: Page, topic: str, limit: int) -> list[tuple[DeadLetterGroup, str]]:
    """Return the largest groups of the dead letters of a topic, each with its link."""
    values = dict.fromkeys(FIELDS, "") | {"topics": topic}
    result, _, _ = await _read_groups(
        page, DeadLetterGroupFilter(**_criteria(values), order="largest", bars=0, limit=limit)
    )
    return [(each, _letters_link(page, values, each)) for each in result.items]


async def _read_groups(page: Page, filter_: DeadLetterGroupFilter) -> tuple[DeadLetterGroupPage, int, str]:
    """Return groups, the number of log records that they lack, and a note on dead letters that they lack."""
    try:
        result, lag = await _read(
            page,
            filter_,
            lambda models: models.dead_letter_groups,
            DeadLetterGroupPage(()),
            lambda result: result.letters,
            "dead_letter_groups",
        )
    except NotFound:
        held, hint = await _read_held(page, filter_)
        return group(held, filter_), 0, hint
    return result, lag, ""


async def _read_held(page: Page, filter_: DeadLetterFilter) -> tuple[list[DeadLetter], str]:
    """Return the dead letters that the mailbox itself holds, and a note on those that they lack."""
    held, is_whole = await read_held(page.mailbox, filter_)
    which = "" if is_whole else f" of the oldest {MAX_READ:,} messages"
    return (
        held,
        f"These are the dead letters{which} that the mailbox holds now, without those that it removed.",
    )


async def _read(
    page: Page,
    filter_: Filter,
    query: Callable[[ReadModels], Callable[[Filter], Result]],
    nothing: Result,
    count: Callable[[Result], int],
    criterion: str,
) -> tuple[Result, int]:
    """Return the result of a query, and the number of log records that the read models lack.

    Arguments: see `read_dead_letters`.

    Raises: NotFound if the store has no read models.
    """
    models = page.data.read_models
    if models is None:
        raise NotFound("This store has no read models, which group dead letters.")
    run = query(models)
    result = await read_dead_letters(
        page.session, filter_, lambda visible: page.blocking(run, visible), nothing, count, criterion
    )
    status = await page.blocking(models.status, 1)
    return result, sum(each.lag for each in status.lags if each.mailbox == page.mailbox.name)


def _values(page: Page) -> dict[str, str]:
    return {name: text_of(page.query, name) for name in FIELDS}


def _criteria(values: Mapping[str, str]) -> dict[str, Any]:
    return {
        "topics": split_lines(values["topics"]),
        "reason": values["reason"].strip() or None,
        "fingerprint": values["fingerprint"].strip() or None,
        "since": parse_time("Since", values["since"]),
        "until": parse_time("Until", values["until"]),
        "text": values["text"] or None,
    }


def _next(page: Page, path: str, values: Mapping[str, str], cursor: str | None) -> str | None:
    return None if cursor is None else page.url(path, **values, cursor=cursor)


def _letters_link(page: Page, values: Mapping[str, str], group: DeadLetterGroup) -> str:
    """Return the link to the dead letters of a group."""
    own = {
        "topics": group.topic or values["topics"],
        "reason": group.reason or values["reason"],
        "fingerprint": group.fingerprint or values["fingerprint"],
    }
    return page.url("/dead-letters/letters", **{name: values[name] for name in FIELDS} | own)


def _redrive_link(page: Page, values: Mapping[str, str], group: DeadLetterGroup | None = None) -> str | None:
    """Return the link to the preview of a redrive job for these dead letters; None if no job selects them."""
    if not page.may(Right.REDRIVE):
        return None
    fingerprint = (group.fingerprint if group is not None else None) or values["fingerprint"].strip()
    if values["text"] and not fingerprint:  # jobs select by the fingerprint of an error, not by its text
        return None
    until = parse_time("Until", values["until"])
    return page.url(
        "/redrives/preview",
        topics=(group.topic if group is not None else None) or split_lines(values["topics"]),
        reasons=(group.reason if group is not None else None) or values["reason"].strip(),
        fingerprints=fingerprint,
        dead_since=values["since"],
        dead_until=write_time(None if until is None else until - MS),
    )


def _redrive_one(page: Page, letter: DeadLetter) -> str | None:
    if not page.may(Right.REDRIVE):
        return None
    return page.url("/redrives/preview", topics=letter.topic, message_ids=letter.message_id)


ROUTES: Final = [
    route("/dead-letters", groups, query=(*FIELDS, "by", "order", "cursor"), lists=FIELDS),
    route("/dead-letters/letters", letters, query=(*FIELDS, "cursor"), lists=FIELDS),
]
