"""`postroom schedule`: messages that a mailbox sends at the times of cron expressions, or at intervals."""

from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from postroom.adapters.cli.output import Time
from postroom.adapters.cli.remote import read_reports, use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import REFUSED, WrongUsage, Yes, parse_duration, parse_pairs, read_payload
from postroom.domain.mailbox.schedule_decisions import unknown_schedule

if TYPE_CHECKING:
    from postroom.application.reports import ScheduleReport

Name = Annotated[str, Argument(help="Name of the schedule.")]


async def list_schedules(session: Session) -> None:
    """List the schedules of a mailbox with their last and next runs."""
    _, reports = await _read(session)
    session.out.records(
        {"schedules": reports},
        ("schedule", "sends to", "at", "last run", "next run", "runs"),
        reports,
        lambda each: (
            each.name,
            each.topic,
            each.describe(),
            None if each.last_run is None else Time(each.last_run),
            "paused" if each.paused else _short(each.next_run, 16),
            each.runs,
        ),
    )


async def show(session: Session, name: Name) -> None:
    """Show a schedule: its message, its times, its last and its next run."""
    mailbox, listed = await _read(session)
    reports = {each.name: each for each in listed}
    report = reports.get(name)
    if report is None:
        raise unknown_schedule(name, mailbox, reports)
    if session.out.as_json:
        session.out.json(report)
        return
    origin = None
    if report.from_code:
        origin = "a worker, changed by an operator since" if report.overridden else "a worker"
    session.out.facts(
        [
            ("schedule", report.name),
            ("status", "paused" if report.paused else "active"),
            ("at", report.describe()),
            ("missed", report.missed),
            ("topic", report.topic),
            ("payload", f"{report.payload_bytes:,} bytes"),
            ("headers", ", ".join(f"{header}={value}" for header, value in report.headers.items())),
            ("content type", report.content_type),
            ("sticky key", report.sticky_key),
            ("last run", None if report.last_run is None else Time(report.last_run)),
            ("last message", report.last_message_id),
            ("last result", report.last_result and report.last_result.replace("_", " ")),
            ("next run", _short(report.next_run)),
            ("runs", f"{report.runs:,}"),
            ("set by", origin),
            ("created", Time(report.created_at)),
        ]
    )


async def set_schedule(
    session: Session,
    name: Name,
    topic: Annotated[str, Argument(help="Topic to which its messages are sent.")],
    payload: Annotated[str, Argument(help="Payload as text; - reads it from stdin.")] = "",
    cron: Annotated[
        str | None,
        Option(metavar="EXPRESSION", help="Minute, hour, day, month, day of the week: '*/5 * * * *'."),
    ] = None,
    every: Annotated[
        str | None, Option(metavar="DURATION", help="Interval, from 1s on, instead of --cron.")
    ] = None,
    timezone: Annotated[
        str, Option(metavar="ZONE", help="Time zone of the expression, such as Europe/Madrid.")
    ] = "UTC",
    missed: Annotated[
        Literal["skip", "last", "all"], Option(help="Which of the missed ticks are sent.")
    ] = "last",
    attr: Annotated[
        list[str] | None, Option(metavar="NAME=VALUE", help="Custom header; may be repeated.")
    ] = None,
    key: Annotated[str | None, Option(help="Sticky key of its messages.")] = None,
    content_type: Annotated[str | None, Option(help="Media type of the payload.")] = None,
    priority: Annotated[int, Option(min=0, max=10, help="10 is the most urgent.")] = 5,
) -> None:
    """Create a schedule, or change one: the mailbox sends its message at each tick, once.

    Example: postroom schedule set nightly reports --cron '0 3 * * *' --timezone Europe/Madrid
    """
    from postroom.domain.schedule import ScheduleSpec

    spec = ScheduleSpec(
        topic,
        cron,
        timezone,
        None if every is None else parse_duration(every),
        missed,
        read_payload(payload, None) if payload else b"",
        parse_pairs(attr or (), "--attr"),
        content_type,
        key,
        priority,
    ).validate()
    async with use_mailbox(session, create=True) as postroom:
        report = await postroom.set_schedule(name, spec)
    session.out.result(report, f"Schedule {name} sends to {topic}: {report.describe()}; {_next(report)}")


async def pause(session: Session, name: Name) -> None:
    """Send no more ticks of a schedule until it is resumed."""
    async with use_mailbox(session) as postroom:
        report = await postroom.pause_schedule(name)
    session.out.result(report, f"Schedule {name} is paused")


async def resume(session: Session, name: Name) -> None:
    """Resume a schedule: send its message at every tick from now on."""
    async with use_mailbox(session) as postroom:
        report = await postroom.resume_schedule(name)
    session.out.result(report, f"Schedule {name} is active; {_next(report)}")


async def run_now(session: Session, name: Name) -> None:
    """Send the message of a schedule now, besides its ticks, and print its id."""
    async with use_mailbox(session) as postroom:
        sent = await postroom.run_schedule(name)
    session.out.result(sent, sent.message_id)


async def delete(session: Session, name: Name, yes: Yes = False) -> int | None:
    """Delete a schedule; the messages that it sent stay."""
    refusal = WrongUsage(f"Deleting schedule {name} can't be undone; add --yes to confirm.")
    if not yes and not session.out.confirm(f"Delete schedule {name}?", refusal):
        return REFUSED
    async with use_mailbox(session) as postroom:
        await postroom.delete_schedule(name)
    session.out.result({"name": name}, f"Schedule {name} is deleted")
    return None


async def _read(session: Session) -> tuple[str, "list[ScheduleReport]"]:
    return await read_reports(session, lambda mailbox: mailbox.list_schedules())


def _next(report: "ScheduleReport") -> str:
    if report.paused:
        return "it is paused"
    return (
        "it has no next run" if report.next_run is None else f"the next run is at {_short(report.next_run)}"
    )


def _short(time: str | None, chars: int = 19) -> str | None:
    """Return a time in RFC 3339 without fractions of a second, or without seconds."""
    return None if time is None else f"{time[:chars]}Z"
