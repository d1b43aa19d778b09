"""`postroom views simulate`: the effect that another retry policy would have had on past messages."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import (
    NOTHING,
    Archive,
    WrongUsage,
    format_duration,
    parse_duration,
    parse_moment,
)
from postroom.application.text import pluralize

if TYPE_CHECKING:
    from postroom.application.queries.simulate_policy import Comparison


def simulate(
    session: Session,
    max_attempts: Annotated[int | None, Option(help="Deliveries before a message is dead-lettered.")] = None,
    backoff_base: Annotated[
        str | None, Option(metavar="DURATION", help="First backoff; it doubles with each attempt.")
    ] = None,
    backoff_max: Annotated[str | None, Option(metavar="DURATION", help="Longest backoff.")] = None,
    visibility: Annotated[str | None, Option(metavar="DURATION", help="Visibility of a delivery.")] = None,
    start: Annotated[
        str | None,
        Option("--from", metavar="POSITION|TIME", help="First message: log position, RFC 3339, or age."),
    ] = None,
    end: Annotated[
        str | None, Option("--to", metavar="POSITION|TIME", help="End (exclusive), in the same format.")
    ] = None,
    topic: Annotated[
        list[str] | None, Option(help="Topic or glob such as admin.users.*; may be repeated.")
    ] = None,
    archive: Archive = None,
) -> int | None:
    """Replay past messages under another retry policy; compare dead letters, deliveries and time in queue.

    Omitted options keep their past values. How a delivery that never took place would have ended is
    unknown, so figures that depend on one are shown as a range, from the best to the worst case.
    """
    from postroom.application.queries.simulate_policy import Simulation
    from postroom.domain.policy_simulation import Changes

    changes = Changes(
        max_attempts=max_attempts,
        backoff_base_ms=_ms(backoff_base),
        backoff_max_ms=_ms(backoff_max),
        visibility_ms=_ms(visibility),
    )
    if changes == Changes():
        raise WrongUsage(
            "Pass at least one of --max-attempts, --backoff-base, --backoff-max and --visibility."
        )
    now = datetime.now(UTC)
    since, until = (None if text is None else parse_moment(text, now) for text in (start, end))
    names = session.mailboxes()
    if len(names) != 1 and (isinstance(since, int) or isinstance(until, int)):
        raise WrongUsage("A log position refers to one mailbox; name it with --mailbox.")
    simulation = Simulation(changes)
    for name in names:
        with session.read(name, archive) as reader, session.out.progress(f"Replaying {name}") as advance:
            reader.simulate_policy(
                simulation,
                start=since,
                end=until,
                topics=topic or (),
                progress=lambda position, advance=advance: advance(position, f"position {position:,}"),  # type: ignore[misc]
            )
    comparison = simulation.comparison()
    _show(session, comparison)
    return None if comparison.messages else NOTHING


def _ms(duration: str | None) -> int | None:
    return None if duration is None else parse_duration(duration)


def _show(session: Session, comparison: "Comparison") -> None:
    if session.out.as_json:
        session.out.json(comparison)
        return
    if not comparison.messages:
        session.out.note("No message matches these topics and times.")
        return
    rows = [_row(name, comparison, field, "{:,}".format) for name, field in _COUNTS]
    rows += [_row(name, comparison, field, format_duration) for name, field in _TIMES]
    session.out.table((f"of {pluralize(comparison.messages, 'message')}", "actual", "simulated"), rows)
    for line in _findings(comparison):
        session.out.line(line)
    session.out.note(f"Assumptions:\n{comparison.assumptions}")


_COUNTS = (
    ("settled at the end", "settled"),
    ("dead at the end", "dead"),
    ("removed", "removed"),
    ("still waiting or in flight", "waiting"),
    ("dead-lettered at any time", "dead_lettered"),
    ("deliveries", "deliveries"),
)
_TIMES = (
    ("time in queue, median", "queued_p50_ms"),
    ("time in queue, p95", "queued_p95_ms"),
    ("time in queue, longest", "queued_max_ms"),
)


def _row(
    name: str, comparison: "Comparison", field: str, text: Callable[[float], str]
) -> tuple[str, str, str]:
    actual, *range_ = (
        getattr(each, field) for each in (comparison.observed, comparison.best, comparison.worst)
    )
    low, high = text(min(range_)), text(max(range_))
    return name, text(actual), low if low == high else f"{low} to {high}"


def _findings(comparison: "Comparison") -> list[str]:
    findings = [f"{pluralize(comparison.unchanged, 'message')} would be unaffected."]
    if comparison.avoided:
        findings.append(f"{pluralize(comparison.avoided, 'dead letter')} would certainly have been settled.")
    if comparison.pending:
        findings.append(
            f"{pluralize(comparison.pending, 'dead letter')} would still be waiting at the end of the log."
        )
    if comparison.caused:
        findings.append(
            f"{pluralize(comparison.caused, 'other message')} would certainly have been dead-lettered."
        )
    if comparison.undecided:
        findings.append(
            f"{pluralize(comparison.undecided, 'message')} would have had deliveries that never took place, "
            f"up to {comparison.more_deliveries:,} in total; their outcome is unknown, so figures are ranges."
        )
    return findings
