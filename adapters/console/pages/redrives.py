"""Pages of redrive jobs: a form, its preview, and the jobs."""

from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any, Final, cast

import uuid_utils
from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.event_filter import PARAMETERS, parse_filter
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.redrive_form import (
    COPIES,
    CRITERIA,
    FAILURE,
    MESSAGE,
    NAMES,
    PACE,
    SELECTION,
    WAITING,
    describe_spec,
    fields_of,
    parse_spec,
    read_values,
)
from postroom.adapters.console.values import MS, parse_number, write_time
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import OUTCOMES, Outcome
from postroom.application.reports import RedriveReport
from postroom.application.text import pluralize
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.redrive.spec import JOB_ACTIONS, JobAction, RedriveSpec

NAV: Final = NavEntry("Redrive jobs", "/redrives", 45, Right.REDRIVE, group="Operations", key="r")
BADGES: Final = {
    "running": "accent",
    "paused": "warn",
    "completed": "good",
    "cancelled": "neutral",
    "undoing": "accent",
    "undone": "neutral",
}
DONE: Final[dict[str, str]] = {
    "redrive": "redriven",
    "archive": "archived",
    "purge": "purged",
    "cancel": "cancelled",
    "reschedule": "rescheduled",
}
SELECTABLE: Final = {
    "redrive": "/redrives/preview",
    "archive": "/redrives/preview",
    "cancel": "/redrives/new",
    "reschedule": "/redrives/new",
}
"""Pages to which searches lead, by action: the form of a job that has further fields, or the preview."""
CHANGES: Final[dict[str, tuple[JobAction, ...]]] = {
    "running": ("pause", "cancel", "undo"),
    "paused": ("resume", "cancel", "undo"),
    "completed": ("undo",),
    "cancelled": ("undo",),
}
"""Actions on a job by its status; undo is for jobs that redrive only."""
NOTICES: Final[dict[JobAction, str]] = {
    "pause": "The job is paused.",
    "resume": "The job is running again.",
    "cancel": "The job is cancelled; its changes stay.",
    "undo": "The messages that the job returned become dead letters again, unless they were received since.",
}
MESSAGES: Final = 50
MAX_FOLLOWED: Final = 250
"""Number of the first messages of a job whose statuses the page counts."""
STATUSES: Final = {
    "acked": "good",
    "dead": "bad",
    "in_flight": "accent",
    "ready": "neutral",
    "delayed": "neutral",
    "expired": "neutral",
}
"""Statuses of messages that a job redrove, with their badges."""


async def list_jobs(page: Page) -> Response:
    """Show the jobs; to htmx, only their table."""
    facts = await _list_facts(page)
    if page.is_fragment:
        return HTMLResponse(page.part("redrives/jobs", **facts))
    return await page.render("redrives/list", **facts)


async def show_form(page: Page) -> Response:
    """Show the form of a job, with the criteria of the URL."""
    await page.check(Right.REDRIVE)
    return await _form(page, read_values(page.query))


async def select(page: Page) -> Response:
    """Redirect from a search to the preview of a job on its matches, or to the form for further fields."""
    action = page.query.get("action", "")
    if action not in SELECTABLE:
        raise InvalidRequest(f"There is no action {action[:40]!r}; choose from {', '.join(SELECTABLE)}.")
    fields = fields_of(action, parse_filter(page.query.multi_items()))
    return page.redirect(SELECTABLE[action], None, **fields)


async def preview(page: Page) -> Response:
    """Show the messages that a job of a form or a link would select, and a button to start it."""
    values = read_values(page.form if page.request.method == "POST" else page.query)
    if page.field("change"):
        return await _form(page, values)
    try:
        if not parse_spec(values).selects_waiting and not values["dead_until"].strip():
            # The job must not select messages that are dead-lettered after the preview.
            values["dead_until"] = await _now(page)
        spec = _read_spec(page, values)
    except InvalidRequest as error:
        return await _form(page, values, error)
    shown = await page.mailbox.preview_redrive(spec)
    return await page.render(
        "redrives/preview",
        spec=spec,
        facts=describe_spec(spec),
        preview=shown,
        done_word=DONE[spec.action],
        selects_all=not any(values[name] for name in CRITERIA),
        fields=[(name, values[name]) for name in NAMES if values[name]],
        shown=[("cutoff", shown.cutoff), ("previewed", shown.matched)],
        job_id=page.field("job_id") or str(uuid_utils.uuid7()),
    )


async def start(page: Page) -> Response:
    """Start a job; submitting a form twice starts one job."""
    values = read_values(page.form)
    job_id = page.field("job_id")
    if not job_id:
        raise InvalidRequest(
            "The form lacks the id of the job; go back to the preview, and start the job there."
        )
    previewed = parse_number("previewed", page.field("previewed"))
    report = await page.mailbox.start_redrive(
        _read_spec(page, values),
        job_id=job_id,
        cutoff=parse_number("cutoff", page.field("cutoff")),
        previewed=previewed,
    )
    text = f"The job has started: {pluralize(report.matched, 'message')} matched."
    if previewed is not None:
        text += " It skips those that have changed since the preview, and says why."
    return page.redirect(f"/redrives/{report.job_id}", text)


async def show(page: Page) -> Response:
    """Show a job with its progress and messages; to htmx, only progress and messages."""
    report = await page.mailbox.get_redrive(page.path["job_id"])
    outcome = page.query.get("outcome") or None
    cursor = page.query.get("cursor") or None
    facts = {
        "job": report,
        **_job_facts(page, report),
        **await _message_facts(page, report, cast("Outcome | None", outcome), cursor),
    }
    if page.is_fragment:
        return HTMLResponse(page.part("redrives/progress", **facts))
    return await page.render("redrives/show", **facts, spec=describe_spec(report.spec, page.mask))


async def _message_facts(
    page: Page, report: RedriveReport, outcome: Outcome | None, cursor: str | None
) -> dict[str, Any]:
    """Return a page of the messages of a job, and how many of the job's first messages have each status."""
    path = f"/redrives/{report.job_id}"
    read = partial(page.mailbox.list_redrive_messages, report.job_id)
    messages = await read(outcome=outcome, cursor=cursor, limit=MESSAGES)
    changed = await read(outcome=None, limit=MAX_FOLLOWED)
    counts = Counter(each.status for each in changed.items if each.outcome in ("redriven", "rescheduled"))
    following = messages.next_cursor
    return {
        "messages": messages.items,
        "outcomes": [("", "All"), *((each, each.capitalize()) for each in _outcomes(report))],
        "outcome": outcome or "",
        "statuses": [(each, counts[each]) for each in STATUSES if counts[each]],
        "badges": STATUSES,
        "is_sample": changed.next_cursor is not None,
        "most": MAX_FOLLOWED,
        "is_moving": any(counts[each] for each in ("ready", "delayed", "in_flight")),
        "own": page.url(path, outcome=outcome, cursor=cursor),
        "next_page": following and page.url(path, outcome=outcome, cursor=following),
    }


async def confirm(page: Page) -> Response:
    """Ask whether to cancel or undo a job."""
    action = _action(page)
    report = await page.mailbox.get_redrive(page.path["job_id"])
    return await page.render("redrives/confirm", job=report, action=action)


async def change(page: Page) -> Response:
    """Pause, resume, cancel or undo a job."""
    action = _action(page)
    report = await page.mailbox.change_redrive(page.path["job_id"], action)
    return page.redirect(f"/redrives/{report.job_id}", NOTICES[action])


def _read_spec(page: Page, values: Mapping[str, str]) -> RedriveSpec:
    """Return the specification of a form.

    Raises: InvalidRequest; Forbidden for criteria whose matches would disclose hidden values.
    """
    spec = parse_spec(values)
    page.mask.check_criteria(spec.filter())
    return spec


def _action(page: Page) -> JobAction:
    action = page.path["action"]
    if action not in JOB_ACTIONS:
        raise NotFound("This page does not exist.")
    return action


async def _form(page: Page, values: dict[str, str], error: InvalidRequest | None = None) -> Response:
    others = [name for name in DONE if name != "redrive"]
    actions = ["redrive", *(others if page.may(Right.ADMIN) else [])]
    return await page.render(
        "redrives/form",
        400 if error is not None else 200,
        values=values,
        error=error,
        actions=[(each, each.capitalize()) for each in actions],
        sections=(
            ("Which messages", SELECTION, True),
            ("Which dead letters", FAILURE, True),
            ("By what they were sent with", MESSAGE, _has_any(values, MESSAGE)),
            ("Pace", PACE, True),
            ("When messages that wait are rescheduled or cancelled", WAITING, _has_any(values, WAITING)),
            ("Send copies instead", COPIES, _has_any(values, COPIES)),
        ),
    )


async def _list_facts(page: Page) -> dict[str, Any]:
    jobs = await page.mailbox.list_redrives()
    return {
        "jobs": [(each, _job_facts(page, each)) for each in jobs],
        "is_active": any(each.is_active or each.status == "paused" for each in jobs),
    }


def _outcomes(report: RedriveReport) -> list[str]:
    """Return the outcomes that messages of a job may have."""
    possible = (DONE[report.spec.action], "skipped", "undone" if report.spec.action == "redrive" else "")
    return [each for each in OUTCOMES if each in possible]


def _job_facts(page: Page, report: RedriveReport) -> dict[str, Any]:
    is_undo = report.status in ("undoing", "undone")
    may = page.may(Right.REDRIVE if report.spec.action == "redrive" else Right.ADMIN)
    changes = CHANGES.get(report.status, ()) if may else ()
    return {
        "badge": BADGES.get(report.status, "neutral"),
        "done": report.restored + report.retained if is_undo else report.moved + report.skipped,
        "total": report.moved if is_undo else report.matched,
        "done_word": DONE[report.spec.action],
        "changes": [each for each in changes if each != "undo" or report.spec.action == "redrive"],
        "is_open": report.is_active or report.status == "paused",
    }


async def _now(page: Page) -> str:
    """Return the mailbox's log time, in whole ms."""
    now = to_us(datetime.fromisoformat((await page.mailbox.get_backlog()).as_of))
    return write_time(now // MS * MS)


def _has_any(values: dict[str, str], fields: Any) -> bool:
    return any(values[field.name] for field in fields)


ROUTES: Final = [
    route("/redrives", list_jobs),
    route("/redrives", start, method="POST"),
    route("/redrives/new", show_form, query=NAMES, lists=NAMES),
    route("/redrives/select", select, query=(*PARAMETERS, "action"), lists=PARAMETERS),
    route("/redrives/preview", preview, query=NAMES, lists=NAMES),
    route("/redrives/preview", preview, method="POST"),
    route("/redrives/{job_id}", show, query=("outcome", "cursor")),
    route("/redrives/{job_id}/{action}", confirm),
    route("/redrives/{job_id}/{action}", change, method="POST"),
]
