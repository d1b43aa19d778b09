"""Actions of the page of a message, each confirmed first: redrive, archive, purge, reschedule and cancel."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import NamedTuple

import uuid_utils
from starlette.responses import Response

from postroom.adapters.console.page import Page, route
from postroom.adapters.console.values import read_due
from postroom.application.query_results import LEFT_ALONE, MessageChange
from postroom.application.reports import RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.errors import Forbidden, NotFound, PostroomError
from postroom.domain.names import check_uuid
from postroom.domain.redrive.spec import RedriveSpec

JOB_POLLS, JOB_SECONDS = 20, 0.05
"""Number and interval of the polls for the end of a job that the page started."""


class _Action(NamedTuple):
    """An action: the right that it needs, its past participle, and the statuses that it is for."""

    right: Right
    done: str
    statuses: tuple[str, ...] = ("dead",)


ACTIONS = {
    "redrive": _Action(Right.REDRIVE, "redriven"),
    "archive": _Action(Right.ADMIN, "archived"),
    "purge": _Action(Right.ADMIN, "purged"),
    "reschedule": _Action(Right.ADMIN, "rescheduled", ("ready", "delayed")),
    "cancel": _Action(Right.ADMIN, "cancelled", ("ready", "delayed", "in_flight")),
}


async def confirm(page: Page) -> Response:
    """Ask whether an action is to be done."""
    return await _ask(page, _action(page), page.query.get("id", ""))


async def act(page: Page) -> Response:
    """Redrive, archive or purge a dead letter, by a job of this one message."""
    action = _action(page)
    detail = await page.session.read_headers(page.field("id"))
    spec = RedriveSpec(
        action=action,  # type: ignore[arg-type]  # one of its literals
        topics=(detail.topic,),
        message_ids=(detail.message_id,),
        # Jobs skip originals that have been replaced by copies, unless they select that reason.
        reasons=("replaced",) if detail.reason == "replaced" else (),
    )
    job_id = check_uuid("The redrive job id", page.field("job_id"))
    report = await page.mailbox.start_redrive(spec, job_id=job_id)
    return redirect_to_message(page, detail.message_id, _describe(await _wait(page, report), action))


async def cancel(page: Page) -> Response:
    """Cancel a message that is ready, delayed or in flight."""
    reason = page.field("reason").strip() or None
    return await _change(page, "cancel", lambda id_: page.mailbox.cancel_messages([id_], reason=reason))


async def reschedule(page: Page) -> Response:
    """Deliver a message that is ready or delayed now, or after a time."""
    due = partial(read_due, "Deliver after", page.field("delay"))
    return await _change(page, "reschedule", lambda id_: page.mailbox.reschedule_messages([id_], **due()))


def redirect_to_message(page: Page, id_: str, notice: str) -> Response:
    """Return the redirect to a message that answers an action; the page shows the notice."""
    return page.redirect("/messages", notice, id=id_)


def _action(page: Page) -> str:
    action = page.path["action"]
    if action not in ACTIONS:
        raise NotFound("This page does not exist.")
    return action


async def _wait(page: Page, report: RedriveReport) -> RedriveReport:
    """Wait until a job has ended, for a second at most; return its latest report."""
    for _ in range(JOB_POLLS):
        if not report.is_active:
            break
        await asyncio.sleep(JOB_SECONDS)
        try:
            report = await page.mailbox.get_redrive(report.job_id)
        except Forbidden:  # the right admin does not include the right redrive, which shows jobs
            break
    return report


def _describe(report: RedriveReport, action: str) -> str:
    """Return the result of a job of one message, as a sentence."""
    done = ACTIONS[action].done
    if report.moved:
        return f"The message was {done}, by job {report.job_id}."
    if report.status == "completed":
        return f"Nothing was {done}: the message is no longer a dead letter (job {report.job_id})."
    return f"The message is to be {done} by job {report.job_id}, which is {report.status}."


async def _ask(page: Page, action: str, id_: str, error: str = "", status: int = HTTPStatus.OK) -> Response:
    """Ask to confirm an action; after an error, with the values that were entered."""
    return await page.render(
        "message/confirm",
        status,
        id=id_,
        message=await page.session.read_headers(id_),
        action=action,
        facts=ACTIONS[action],
        may=page.may(ACTIONS[action].right),
        job_id=str(uuid_utils.uuid7()),
        error=error,
    )


async def _change(
    page: Page, action: str, change: Callable[[str], Awaitable[list[MessageChange]]]
) -> Response:
    """Change the message of a form by its id, and tell the outcome."""
    id_ = page.field("id")
    await page.session.read_headers(id_)  # refuses a message that the caller may not see
    try:
        (result,) = await change(id_)
    except PostroomError as error:
        return await _ask(page, action, id_, str(error), error.status)
    done, outcome = ACTIONS[action].done, result.outcome
    if outcome == "changed":
        return redirect_to_message(page, id_, f"The message was {done}.")
    notice = f"Nothing was {done}, as the message {LEFT_ALONE[outcome]}."
    if outcome == "expires_first":
        return await _ask(page, action, id_, notice, HTTPStatus.BAD_REQUEST)
    return redirect_to_message(page, id_, notice)


ROUTES = [
    route("/message/cancel", cancel, method="POST"),
    route("/message/reschedule", reschedule, method="POST"),
    route("/message/{action}", confirm, query=("id",)),
    route("/message/{action}", act, method="POST"),
]
