"""The page of schedules: their list, with buttons to pause, resume and run them, and a form to delete one."""

from typing import Final

from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.domain.capability.rights import Right

NAV: Final = NavEntry("Schedules", "/schedules", 55, group="Operations", key="h")


async def list_schedules(page: Page) -> Response:
    """Show the schedules; to htmx, only their table."""
    reports = await page.mailbox.list_schedules()
    facts = {
        "rows": [(each, page.mask.hide_headers(each.headers)) for each in reports],
        "may_change": page.may(Right.ADMIN) and page.grant.covers_all_topics,
    }
    if page.is_fragment:
        return HTMLResponse(page.part("schedules/table", **facts))
    return await page.render("schedules/list", **facts)


async def pause(page: Page) -> Response:
    """Pause a schedule."""
    report = await page.mailbox.pause_schedule(page.field("name"))
    return page.redirect(
        "/schedules", f"Schedule {report.name} is paused: it sends nothing until it is resumed."
    )


async def resume(page: Page) -> Response:
    """Resume a schedule."""
    report = await page.mailbox.resume_schedule(page.field("name"))
    return page.redirect("/schedules", f"Schedule {report.name} is active.")


async def run(page: Page) -> Response:
    """Send the message of a schedule now."""
    name = page.field("name")
    sent = await page.mailbox.run_schedule(name)
    return page.redirect("/schedules", f"Schedule {name} has sent message {sent.message_id}.")


async def show_delete(page: Page) -> Response:
    """Ask whether to delete a schedule."""
    page.require_all(Right.ADMIN)
    return await page.render("schedules/delete", name=page.query.get("name", ""))


async def delete(page: Page) -> Response:
    """Delete a schedule."""
    name = page.field("name")
    await page.mailbox.delete_schedule(name)
    return page.redirect("/schedules", f"Schedule {name} is deleted.")


ROUTES: Final = [
    route("/schedules", list_schedules),
    route("/schedules/pause", pause, method="POST"),
    route("/schedules/resume", resume, method="POST"),
    route("/schedules/run", run, method="POST"),
    route("/schedules/delete", show_delete, query=("name",)),
    route("/schedules/delete", delete, method="POST"),
]
