"""`postroom subscription`: topics that get a copy of each message of other topics."""

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from postroom.adapters.cli.output import Time
from postroom.adapters.cli.remote import read_reports, use_mailbox
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import NOTHING, REFUSED, WrongUsage, Yes, parse_moment, parse_pairs
from postroom.application.text import pluralize
from postroom.domain.mailbox.subscription_decisions import unknown_subscription

if TYPE_CHECKING:
    from postroom.application.query_results import Moment
    from postroom.application.reports import RewindReport, SubscriptionReport

Name = Annotated[str, Argument(help="Name of the subscription, and of its topic.")]


async def list_subscriptions(session: Session) -> None:
    """List the subscriptions of a mailbox: their filters, their progress, and their messages by status."""
    _, reports = await _read(session)
    unused = [name for name in ("skipped", "paused") if not any(getattr(each, name) for each in reports)]
    session.out.records(
        {"subscriptions": reports},
        ("subscription", "gets", "status", "behind", "ready", "in flight", "dead", "skipped", "paused"),
        reports,
        lambda each: (
            each.name,
            each.filter.describe(),
            each.status,
            each.behind,
            each.ready,
            each.in_flight,
            each.dead,
            each.skipped,
            "paused" if each.paused else None,
        ),
        only_wide=unused,
    )
    for each in reports:
        if each.problem:
            session.out.note(f"{each.name} copies nothing after position {each.position:,}: {each.problem}")
        for where, mailboxes in (("missing", each.missing_in), ("of another filter", each.differs_in)):
            if mailboxes:
                names = ", ".join(mailboxes)
                session.out.note(f"{each.name} is {where} in {names}; repeat the change that failed there.")


async def show(session: Session, name: Name) -> None:
    """Show a subscription: its filter, its progress, and its messages by status."""
    mailbox, listed = await _read(session)
    reports = {each.name: each for each in listed}
    report = reports.get(name)
    if report is None:
        raise unknown_subscription(name, mailbox, reports)
    if session.out.as_json:
        session.out.json(report)
        return
    session.out.facts(
        [
            ("subscription", report.name),
            ("topics", ", ".join(report.topics)),
            ("headers", ", ".join(f"{header}={value}" for header, value in report.headers.items())),
            ("status", report.status + (", paused" if report.paused else "")),
            ("position", f"{report.position:,} ({report.behind:,} behind)"),
            ("problem", report.problem),
            ("skipped", f"{report.skipped:,} messages that could not be copied" if report.skipped else None),
            ("messages", f"{report.ready:,} ready, {report.in_flight:,} in flight, {report.dead:,} dead"),
            ("created", Time(report.created_at)),
            ("missing in", ", ".join(report.missing_in)),
            ("other filter in", ", ".join(report.differs_in)),
        ]
    )


async def set_subscription(
    session: Session,
    name: Name,
    topics: Annotated[
        list[str], Argument(metavar="TOPIC...", help="Topics or globs such as 'orders.*' that it gets.")
    ],
    header: Annotated[
        list[str] | None,
        Option(metavar="NAME=VALUE", help="Only messages with this custom header; may be repeated."),
    ] = None,
    start: Annotated[
        str,
        Option(
            metavar="now|beginning|POSITION|TIME",
            help="For a new one: also copy messages from then on; RFC 3339, or an age such as 2h.",
        ),
    ] = "now",
    if_missing: Annotated[
        bool, Option("--if-missing", help="Create it if it is missing; an existing one keeps its filter.")
    ] = False,
) -> None:
    """Create a subscription, which gets a copy of each message of its topics, or change its filter.

    A new filter is for messages from then on. Receive from a subscription as from any topic: postroom recv
    NAME. Example: postroom subscription set mail 'orders.*' refunds --header country=de
    """
    from postroom.domain.subscription import SubscriptionFilter

    moment = None if start == "now" else _parse_start(start)
    filter_ = SubscriptionFilter(tuple(topics), parse_pairs(header or (), "--header")).validate()
    async with use_mailbox(session, create=True) as postroom:
        report = await postroom.set_subscription(name, filter_, start=moment, if_missing=if_missing)
    session.out.result(report, f"Subscription {name} gets {report.filter.describe()}; {_progress(report)}")


async def rewind(
    session: Session,
    name: Name,
    to: Annotated[
        str,
        Option(
            metavar="beginning|POSITION|TIME",
            help="Moment after which messages are copied again; RFC 3339, or an age such as 2h.",
        ),
    ],
    dry_run: Annotated[
        bool, Option("--dry-run", help="Only count what would be removed and copied.")
    ] = False,
    yes: Yes = False,
) -> int | None:
    """Empty a subscription, and copy the messages since a moment to it again.

    Its messages are removed, also those in flight and its dead letters. The owner of the mailbox copies in
    the background. Example: postroom subscription rewind mail --to 2h --dry-run
    """
    moment = _parse_start(to)
    async with use_mailbox(session) as postroom:
        if dry_run or not yes:
            preview = await postroom.rewind_subscription(name, moment, dry_run=True)
            if dry_run:
                session.out.result(preview, _effects(preview, "would be"))
                return None if preview.removed or preview.copied else NOTHING
            effects = _effects(preview, "would be")
            refusal = WrongUsage(
                f"Nothing was changed: {effects}. That can't be undone; add --yes to confirm."
            )
            if not session.out.confirm(f"{effects}. Rewind {name}?", refusal):
                return REFUSED
        report = await postroom.rewind_subscription(name, moment)
    session.out.result(report, _effects(report, "are"))
    return None


async def delete(
    session: Session,
    name: Name,
    dry_run: Annotated[bool, Option("--dry-run", help="Only count the messages that would stay.")] = False,
    yes: Yes = False,
) -> int | None:
    """Delete a subscription: it gets no more copies, and its messages stay in its topic."""
    refusal = WrongUsage(f"Deleting subscription {name} can't be undone; add --yes to confirm.")
    if not (yes or dry_run) and not session.out.confirm(f"Delete subscription {name}?", refusal):
        return REFUSED
    async with use_mailbox(session) as postroom:
        report = await postroom.delete_subscription(name, dry_run=dry_run)
    done = f"Subscription {name} is deleted"
    if dry_run:
        counts = f"{report.ready:,} ready, {report.in_flight:,} in flight and {report.dead:,} dead messages"
        behind = f" {report.behind:,} positions of the log behind" if report.behind else ""
        done = f"Subscription {name} would be deleted{behind}; its topic keeps {counts}"
    session.out.result(report, done)
    if (left := report.left) and not dry_run:
        session.out.note(
            f"{pluralize(left, 'message')} left in topic {name}; receive them, or remove them with: postroom "
            f"topic purge {name}"
        )
    return None


async def _read(session: Session) -> tuple[str, "list[SubscriptionReport]"]:
    return await read_reports(session, lambda mailbox: mailbox.list_subscriptions())


def _parse_start(text: str) -> "Moment":
    """Return the moment that an option names; the beginning of the log is position 0."""
    return 0 if text == "beginning" else parse_moment(text, datetime.now(UTC))


def _progress(report: "SubscriptionReport") -> str:
    if report.status == "live":
        return "it is live"
    return f"it is {report.status} and {report.behind:,} positions of the log behind"


def _effects(report: "RewindReport", verb: str) -> str:
    removed = pluralize(report.removed, "message")
    if report.removed == 1 and verb == "are":
        verb = "is"
    return f"{removed} {verb} removed from {report.name}, and {report.copied:,} copied to it again"
