"""Pages of subscriptions: their list, and forms to rewind and delete them."""

from typing import Final

from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.page import NavEntry, Page, parse_moment, route
from postroom.application.query_results import Moment
from postroom.application.reports import SubscriptionReport
from postroom.application.text import pluralize
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.subscription_decisions import unknown_subscription

NAV: Final = NavEntry("Subscriptions", "/subscriptions", 50, group="Operations", key="b")


async def list_subscriptions(page: Page) -> Response:
    """Show the subscriptions; to htmx, only their table."""
    reports = await page.mailbox.list_subscriptions()
    facts = {
        "rows": [(each, page.mask.hide_headers(each.headers)) for each in reports],
        "is_active": any(each.status != "live" for each in reports),
        "may_change": page.may(Right.ADMIN) and page.grant.covers_all_topics,
    }
    if page.is_fragment:
        return HTMLResponse(page.part("subscriptions/table", **facts))
    return await page.render("subscriptions/list", **facts)


async def show_rewind(page: Page) -> Response:
    """Show the form of a rewind."""
    return await _form(page, page.query.get("name", ""), "")


async def preview_rewind(page: Page) -> Response:
    """Show what a rewind would remove and copy, and a button that does it."""
    name, start = page.field("name"), page.field("start")
    if page.field("change"):
        return await _form(page, name, start)
    try:
        moment = _parse_start(start)
        report = await page.mailbox.rewind_subscription(name, moment, dry_run=True)
    except InvalidRequest as error:
        return await _form(page, name, start, error)
    # An age counts from now, not from when the button is pressed.
    fields = [("name", name), ("start", str(moment) if isinstance(moment, int) else moment.isoformat())]
    return await page.render("subscriptions/preview", report=report, fields=fields)


async def rewind(page: Page) -> Response:
    """Rewind a subscription."""
    report = await page.mailbox.rewind_subscription(page.field("name"), _parse_start(page.field("start")))
    return page.redirect(
        "/subscriptions",
        f"Subscription {report.name} is rewound: {pluralize(report.removed, 'message')} removed, "
        f"{report.copied:,} copied again.",
    )


async def show_delete(page: Page) -> Response:
    """Ask whether to delete a subscription."""
    return await page.render("subscriptions/delete", report=await _find(page, page.query.get("name", "")))


async def delete(page: Page) -> Response:
    """Delete a subscription."""
    name = page.field("name")
    left = (await page.mailbox.delete_subscription(name)).left
    notice = f"Subscription {name} is deleted; {pluralize(left, 'message')} left in its topic."
    return page.redirect("/subscriptions", notice)


async def _form(page: Page, name: str, start: str, error: InvalidRequest | None = None) -> Response:
    report = await _find(page, name)
    status = 200 if error is None else 400
    return await page.render("subscriptions/rewind", status, report=report, start=start, error=error)


async def _find(page: Page, name: str) -> SubscriptionReport:
    """Return a subscription that the caller may change; raise NotFound or Forbidden."""
    page.require_all(Right.ADMIN)
    reports = {each.name: each for each in await page.mailbox.list_subscriptions()}
    if name not in reports:
        raise unknown_subscription(name, page.mailbox.name, reports)
    return reports[name]


def _parse_start(text: str) -> Moment:
    """Return the moment of a form; the beginning of the log is position 0."""
    moment = 0 if text.strip() == "beginning" else parse_moment(text.strip())
    if moment is None:
        raise InvalidRequest("The moment is missing; write a time, an age such as 2h, or beginning.")
    return moment


ROUTES: Final = [
    route("/subscriptions", list_subscriptions),
    route("/subscriptions/rewind", show_rewind, query=("name",)),
    route("/subscriptions/preview", preview_rewind, method="POST"),
    route("/subscriptions/rewind", rewind, method="POST"),
    route("/subscriptions/delete", show_delete, query=("name",)),
    route("/subscriptions/delete", delete, method="POST"),
]
