"""`postroom redrive`: jobs that change the dead letters, or the waiting messages, of a query."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.filters import Cursor
from postroom.adapters.cli.output import Id
from postroom.adapters.cli.output import Time as Age
from postroom.adapters.cli.remote import use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    NOTHING,
    REFUSED,
    WrongUsage,
    Yes,
    parse_due,
    parse_duration,
    parse_pairs,
    parse_time,
)

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.query_results import Outcome, RedrivePreview
    from postroom.application.reports import RedriveReport
    from postroom.domain.redrive.spec import JobAction

POLL_SECONDS = 0.2
_OUTCOMES = ("redriven", "archived", "purged", "cancelled", "rescheduled", "skipped", "undone")
JobId = Annotated[str, Argument(help="Id of the job.")]
Time = Annotated[
    str | None,
    Option(metavar="TIME", help="End: RFC 3339, ms since 1970, or an age such as 2h."),
]
Texts = list[str] | None


async def start(
    session: Session,
    text: Annotated[
        str | None, Argument(help="Substrings that must all occur in headers, as in 'smith 0f3a'.")
    ] = None,
    match: Annotated[
        str | None, Option(metavar="'WORD WOR*'", help="Words or prefixes of headers and payloads.")
    ] = None,
    topic: Annotated[Texts, Option(help="Topic or glob such as orders.*; may be repeated.")] = None,
    reason: Annotated[Texts, Option(help="Reason such as max_attempts; may be repeated.")] = None,
    fingerprint: Annotated[Texts, Option(help="Fingerprint of the error; may be repeated.")] = None,
    key: Annotated[Texts, Option(help="Sticky key; may be repeated.")] = None,
    status: Annotated[
        Texts,
        Option(metavar="ready|in_flight", help="Cancel or reschedule only these; may be repeated."),
    ] = None,
    id_: Annotated[Texts, Option("--id", help="Only this message; may be repeated.")] = None,
    dead_since: Annotated[
        str | None, Option(metavar="TIME", help="Dead-lettered at or after: RFC 3339, ms, or an age.")
    ] = None,
    dead_until: Time = None,
    since: Annotated[str | None, Option(metavar="TIME", help="Published at or after.")] = None,
    until: Time = None,
    principal: Annotated[Texts, Option(help="Publisher; may be repeated.")] = None,
    correlation_id: Annotated[str | None, Option(help="Correlation id.")] = None,
    trace_id: Annotated[str | None, Option(help="Trace id.")] = None,
    namespace: Annotated[str | None, Option(help="Namespace.")] = None,
    header: Annotated[Texts, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")] = None,
    action: Annotated[
        str,
        Option(
            metavar="redrive|archive|purge|cancel|reschedule",
            help="Action on the dead letters; cancel and reschedule act on waiting messages.",
        ),
    ] = "redrive",
    rate: Annotated[int | None, Option(help="Maximum number of messages per second.")] = None,
    delay: Annotated[
        str | None, Option(metavar="DURATION", help="Delay of their delivery; 0 is at once.")
    ] = None,
    at: Annotated[
        str | None, Option(metavar="TIME", help="Reschedule them to this time, such as 2026-12-01T08:00Z.")
    ] = None,
    note: Annotated[str | None, Option(help="Why they are cancelled, for their history.")] = None,
    limit: Annotated[int | None, Option(help="Maximum number of messages.")] = None,
    to: Annotated[str | None, Option(metavar="TOPIC", help="Send copies to this topic instead.")] = None,
    set_header: Annotated[
        Texts,
        Option(metavar="NAME=VALUE", help="Send copies with this custom header; may be repeated."),
    ] = None,
    remove_header: Annotated[
        Texts, Option(metavar="NAME", help="Send copies without this custom header; may be repeated.")
    ] = None,
    merge_patch: Annotated[
        str | None,
        Option(metavar="JSON|@FILE", help="Send copies with payloads changed by this JSON merge patch."),
    ] = None,
    job_id: Annotated[str | None, Option(help="Id of the job; repeating a start has no effect.")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Only show the messages that match.")] = False,
    detach: Annotated[bool, Option("--detach", help="Do not wait until the job has ended.")] = False,
    yes: Yes = False,
) -> int | None:
    """Start a job that redrives, archives or purges the dead letters that match a query now.

    With --action cancel, it removes messages that are ready, delayed or in flight; with --action reschedule,
    it changes when those that are ready or delayed may be delivered. Messages that are sent later stay
    unchanged.

    The owner of the mailbox runs the job; use --detach only while another process, such as a server, owns it.
    """
    from postroom.domain.redrive.spec import Action, RedriveSpec, WaitingStatus

    now = datetime.now(UTC)
    if action == "reschedule" and (delay is None) == (at is None):
        raise WrongUsage("Pass either --delay or --at; --delay 0 delivers the messages now.")
    times = {"dead_since": dead_since, "dead_until": dead_until, "start_time": since, "end_time": until}
    spec = RedriveSpec(
        action=cast(Action, action),
        topics=tuple(topic or ()),
        reasons=tuple(reason or ()),
        fingerprints=tuple(fingerprint or ()),
        message_ids=tuple(id_ or ()),
        principals=tuple(principal or ()),
        correlation_id=correlation_id,
        trace_id=trace_id,
        namespace=namespace,
        headers=parse_pairs(header or (), "--header"),
        text=text,
        match=match,
        rate=rate,
        delay_ms=parse_duration(delay or "0"),
        limit=limit,
        destination=to,
        set_headers=parse_pairs(set_header or (), "--set-header"),
        remove_headers=tuple(remove_header or ()),
        merge_patch=_read_patch(merge_patch),
        keys=tuple(key or ()),
        statuses=cast(tuple[WaitingStatus, ...], tuple(status or ())),
        at=None if at is None else int(parse_due("--at", at).timestamp() * 1_000),
        note=note,
        **{name: None if time is None else parse_time(time, now) for name, time in times.items()},
    ).validate()
    async with use_mailbox(session) as postroom:
        if dry_run:
            return _show_preview(session, await postroom.preview_redrive(spec))
        if spec.action in ("purge", "cancel") and not yes:
            refusal = WrongUsage(
                f"A {spec.action} can't be undone; add --yes to confirm, or --dry-run to see it first."
            )
            selected = "messages" if spec.selects_waiting else "dead letters"
            if not session.out.confirm(f"Remove the {selected} that the query selects?", refusal):
                return REFUSED
        report = await postroom.start_redrive(spec, job_id=job_id)
        if not detach:
            report = await _follow(session, postroom, report)
    _show_result(session, report)
    return None


async def list_jobs(session: Session) -> None:
    """List the redrive jobs of a mailbox, newest first."""
    async with use_mailbox(session) as postroom:
        reports = await postroom.list_redrives()
    session.out.records(
        {"jobs": reports},
        ("job", "action", "status", "matched", "done", "skipped", "age"),
        reports,
        lambda each: (
            Id(each.job_id),
            each.spec.action,
            each.status,
            each.matched,
            each.moved,
            each.skipped,
            Age(each.started_at),
        ),
        only_wide=("skipped",),
    )


async def show(
    session: Session,
    job: JobId,
    messages: Annotated[bool, Option("--messages", help="List its messages instead.")] = False,
    outcome: Annotated[
        str | None,
        Option(metavar="|".join(_OUTCOMES), help="List only messages with this outcome."),
    ] = None,
    limit: Annotated[int, Option(help="Maximum number of messages, 1 to 1,000.")] = 100,
    cursor: Cursor = None,
) -> None:
    """Show a redrive job with its selection and progress, or a page of its messages."""
    async with use_mailbox(session) as postroom:
        if not (messages or outcome or cursor):
            _show(session, await postroom.get_redrive(job))
            return
        page = await postroom.list_redrive_messages(
            job, outcome=cast("Outcome | None", outcome), cursor=cursor, limit=limit
        )
    session.out.records(
        {"messages": page.items, "next_cursor": page.next_cursor},
        ("message", "topic", "outcome", "status", "reason", "copy"),
        page.items,
        lambda each: (
            Id(each.message_id),
            each.topic,
            each.outcome,
            each.status,
            each.reason,
            each.copy_id and Id(each.copy_id),
        ),
    )
    session.out.note_more(page.next_cursor)


async def pause(session: Session, job: JobId) -> None:
    """Pause a redrive job."""
    await _change(session, job, "pause")


async def resume(
    session: Session,
    job: JobId,
    detach: Annotated[bool, Option("--detach", help="Do not wait until the job has ended.")] = False,
) -> None:
    """Resume a redrive job."""
    await _change(session, job, "resume", is_followed=not detach)


async def cancel(session: Session, job: JobId) -> None:
    """Cancel a redrive job; its effects stay."""
    await _change(session, job, "cancel")


async def undo(session: Session, job: JobId) -> None:
    """Make the messages that a redrive job returned dead letters again, unless they were received since."""
    await _change(session, job, "undo", is_followed=True)


async def _change(session: Session, job: str, action: "JobAction", *, is_followed: bool = False) -> None:
    async with use_mailbox(session) as postroom:
        report = await postroom.change_redrive(job, action)
        if is_followed:
            report = await _follow(session, postroom, report)
    _show_result(session, report)


async def _follow(session: Session, postroom: "Mailbox", report: "RedriveReport") -> "RedriveReport":
    """Wait until a job no longer runs, and return its report; interrupting the wait does not stop the job."""
    with session.out.progress(f"job {report.job_id}", total=report.matched) as update:
        while report.is_active:
            await asyncio.sleep(POLL_SECONDS)
            report = await postroom.get_redrive(report.job_id)
            update(report.moved + report.skipped, f"{report.moved:,} of {report.matched:,}")
    return report


def _read_patch(text: str | None) -> str | None:
    """Return a merge patch; for text such as `@FILE`, the merge patch in the file."""
    if text is None or not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise WrongUsage(f"--merge-patch: the file {text[1:]} can't be read: {error}.") from None


def _show_preview(session: Session, preview: "RedrivePreview") -> int | None:
    if session.out.as_json:
        session.out.json(preview)
    else:
        session.out.table(
            ("topic", "reason", "fingerprint", "messages", "error"),
            [
                (each.topic, each.reason, each.fingerprint, each.count, each.last_error)
                for each in preview.groups
            ],
        )
        ids = ", ".join(each.message_id for each in preview.samples)
        session.out.note(f"{preview.matched:,} would be selected" + (f", such as {ids}" if ids else ""))
    return None if preview.matched else NOTHING


def _show_result(session: Session, report: "RedriveReport") -> None:
    done = f"{report.restored:,} restored" if report.status == "undone" else f"{report.moved:,} done"
    session.out.result(
        msgspec.to_builtins(report),
        f"Job {report.job_id} is {report.status}: {report.matched:,} matched, {done}",
    )


def _show(session: Session, report: "RedriveReport") -> None:
    if session.out.as_json:
        session.out.json(report)
        return
    spec = {name: value for name, value in msgspec.to_builtins(report.spec).items() if name != "action"}
    facts = {"action": report.spec.action, **msgspec.to_builtins(report)}
    facts["spec"] = None
    ids = [("  message_ids", Id(each)) for each in spec.pop("message_ids", None) or ()]
    session.out.facts([*facts.items(), *((f"  {name}", _text(value)) for name, value in spec.items()), *ids])


def _text(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return (
        ", ".join(f"{name}={text}" for name, text in value.items()) if isinstance(value, dict) else str(value)
    )
