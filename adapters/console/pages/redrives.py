"""Pages of redrive jobs: a form, its preview, and the jobs."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, NamedTuple, cast

import msgspec
import uuid_utils
from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.event_filter import check_mask
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import (
    MS,
    Fields,
    parse_number,
    parse_time,
    split_lines,
    split_pairs,
    text_of,
    write_time,
)
from postroom.application.masking import MASK, NO_MASK, Mask
from postroom.application.queries.mailbox_past import to_us
from postroom.application.query_results import OUTCOMES, Outcome, RedriveReport
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.redrive.spec import JOB_ACTIONS, Action, JobAction, RedriveSpec


class Field(NamedTuple):
    """A field of the form.

    Arguments:
        kind: `text`, `number`, `time`, `lines` (a value per line), `pairs` (`NAME=VALUE` per line) or `json`.
    """

    name: str
    label: str
    kind: str = "text"
    hint: str = ""


SELECTION: Final = (
    Field("topics", "Topics", "lines", "Names or globs such as orders.*, one a line"),
    Field("keys", "Sticky keys", "lines", "One a line"),
    Field("message_ids", "Message ids", "lines", "One a line, up to 1,000"),
)
FAILURE: Final = (
    Field("fingerprints", "Fingerprints", "lines", "Of errors, one a line"),
    Field("reasons", "Reasons", "lines", "Such as max_attempts, one a line"),
    Field(
        "dead_since", "Dead-lettered since", "time", "Time such as 2026-01-31T08:00Z, or an age such as 2h"
    ),
    Field("dead_until", "Dead-lettered until", "time", "Inclusive; the preview enters its own time here"),
)
MESSAGE: Final = (
    Field("start_time", "Published since", "time"),
    Field("end_time", "Published until", "time"),
    Field("principals", "Principals", "lines", "Publishers, one a line"),
    Field("correlation_id", "Correlation id"),
    Field("trace_id", "Trace id"),
    Field("namespace", "Namespace"),
    Field("headers", "Custom headers", "pairs", "NAME=VALUE, one a line"),
    Field("text", "Text in headers", "text", "Substrings, all of which must occur"),
    Field("match", "Words", "text", "In headers and payloads; a final * is any ending"),
)
PACE: Final = (
    Field("rate", "Messages a second", "number", "No limit if empty"),
    Field("delay_ms", "Delay in ms", "number", "Until the messages may be delivered"),
    Field("limit", "Maximum number of messages", "number", "No limit if empty"),
)
WAITING: Final = (
    Field("at", "Deliver at", "time", "Instead of a delay, when messages are rescheduled"),
    Field("note", "Why", "text", "For the history of messages that are cancelled"),
)
COPIES: Final = (
    Field("destination", "Destination", "text", "Another topic of the mailbox, to which copies are sent"),
    Field("set_headers", "Set headers", "pairs", "NAME=VALUE, one a line"),
    Field("remove_headers", "Remove headers", "lines", "Names, one a line"),
    Field("merge_patch", "Change payloads", "json", "JSON object that is merged into payloads (RFC 7396)"),
)
CRITERIA: Final = tuple(
    field.name for field in (*SELECTION, *FAILURE, *MESSAGE) if field.name != "dead_until"
)
"""Criteria; if all of them are empty, a job selects all dead letters of the mailbox, or all that waits."""
_ANY_VALUE: Final = ("text", "match", "merge_patch")
"""Fields whose values may come from any header or payload."""
FIELDS: Final = (*SELECTION, *FAILURE, *MESSAGE, *PACE, *WAITING, *COPIES)
NAMES: Final = ("action", *(field.name for field in FIELDS))


def read_values(fields: Fields) -> dict[str, str]:
    """Return the text of all fields of the form."""
    return {name: text_of(fields, name) for name in NAMES}


def parse_spec(values: Mapping[str, str]) -> RedriveSpec:
    """Return the specification that the fields describe.

    Raises: InvalidRequest naming the first invalid field.
    """
    parsed: dict[str, Any] = {field.name: _parse(field, values[field.name]) for field in FIELDS}
    criteria = {name: value for name, value in parsed.items() if value is not None}
    return RedriveSpec(action=cast(Action, values["action"] or "redrive"), **criteria).validate()


def describe_spec(spec: RedriveSpec, mask: Mask = NO_MASK) -> list[tuple[str, str]]:
    """Return labels and texts of the fields of a specification that are set.

    Arguments:
        mask: headers and fields that are hidden from the reader.
    """
    facts = msgspec.structs.asdict(spec)
    for name in ("headers", "set_headers"):
        facts[name] = mask.hide_headers(facts[name])
    if spec.principals and mask.covers_header("principal"):
        facts["principals"] = (MASK,)
    for name in ("correlation_id", "trace_id", "namespace", "text", "match", "merge_patch"):
        is_hidden = mask != NO_MASK if name in _ANY_VALUE else mask.covers_header(name)
        if facts[name] is not None and is_hidden:
            facts[name] = MASK
    defaults = msgspec.structs.asdict(RedriveSpec())
    return [
        (field.label, _write(field, facts[field.name]))
        for field in FIELDS
        if facts[field.name] != defaults[field.name]
    ]


def _parse(field: Field, text: str) -> object:
    if not text.strip():
        return None
    match field.kind:
        case "number":
            return parse_number(field.label, text)
        case "time":
            time = parse_time(field.label, text)
            return None if time is None else time // MS
        case "lines":
            return split_lines(text)
        case "pairs":
            return split_pairs(field.label, text)
        case _:
            return text


def _write(field: Field, value: Any) -> str:
    match field.kind:
        case "time":
            return write_time(value * MS)
        case "lines":
            return "\n".join(value)
        case "pairs":
            return "\n".join(f"{name}={text}" for name, text in value.items())
        case _:
            return str(value)


NAV: Final = NavEntry("Redrive jobs", "/redrives", 45, Right.REDRIVE)
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
    "undo": "The messages of the job become dead letters again, except those that were received since.",
}
MESSAGES: Final = 50


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


async def preview(page: Page) -> Response:
    """Show the messages that a job would select, and a button to start it."""
    values = read_values(page.form)
    if page.field("change"):
        return await _form(page, values)
    try:
        if not parse_spec(values).selects_waiting and not values["dead_until"].strip():
            # The job must not select messages that are dead-lettered after the preview.
            values["dead_until"] = await _now(page)
        spec = _read_spec(page, values)
    except InvalidRequest as error:
        return await _form(page, values, error)
    return await page.render(
        "redrives/preview",
        spec=spec,
        facts=describe_spec(spec),
        preview=await page.mailbox.preview_redrive(spec),
        done_word=DONE[spec.action],
        selects_all=not any(values[name] for name in CRITERIA),
        fields=[(name, values[name]) for name in NAMES if values[name]],
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
    report = await page.mailbox.start_redrive(_read_spec(page, values), job_id=job_id)
    return page.redirect(
        f"/redrives/{report.job_id}", f"The job has started: {report.matched:,} messages matched."
    )


async def show(page: Page) -> Response:
    """Show a job with its progress; to htmx, only the progress."""
    report = await page.mailbox.get_redrive(page.path["job_id"])
    facts = {"job": report, **_job_facts(page, report)}
    if page.is_fragment:
        return HTMLResponse(page.part("redrives/progress", **facts))
    outcome = page.query.get("outcome") or None
    messages = await page.mailbox.list_redrive_messages(
        report.job_id,
        outcome=cast("Outcome | None", outcome),
        cursor=page.query.get("cursor") or None,
        limit=MESSAGES,
    )
    cursor = messages.next_cursor
    return await page.render(
        "redrives/show",
        **facts,
        spec=describe_spec(report.spec, page.mask),
        messages=messages.items,
        outcomes=[("", "All"), *((each, each.capitalize()) for each in OUTCOMES)],
        outcome=outcome or "",
        next_page=cursor and page.url(f"/redrives/{report.job_id}", outcome=outcome, cursor=cursor),
    )


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
    check_mask(spec.filter(), page.mask)
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
    route("/redrives/new", show_form),
    route("/redrives/preview", preview, method="POST"),
    route("/redrives/{job_id}", show),
    route("/redrives/{job_id}/{action}", confirm),
    route("/redrives/{job_id}/{action}", change, method="POST"),
]
