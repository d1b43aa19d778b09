"""`postroom project simulate`: what another retry policy would have made of history."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.failures import NOTHING
from postroom.adapters.cli.moments import Archive, parse_moment
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, format_duration, parse_duration

if TYPE_CHECKING:
    from postroom.application.queries.simulate_policy import Comparison


def simulate(
    session: Session,
    max_attempts: Annotated[int | None, Option(help="Deliveries before a message dies.")] = None,
    backoff_base: Annotated[str | None, Option(metavar="DURATION", help="What pauses grow from.")] = None,
    backoff_max: Annotated[str | None, Option(metavar="DURATION", help="The longest pause.")] = None,
    visibility: Annotated[
        str | None, Option(metavar="DURATION", help="How long a delivery hides its message.")
    ] = None,
    start: Annotated[
        str | None,
        Option(
            "--from", metavar="POSITION|TIME", help="Messages sent from then on: position, RFC 3339, age."
        ),
    ] = None,
    end: Annotated[
        str | None, Option("--to", metavar="POSITION|TIME", help="Messages sent before then, the same way.")
    ] = None,
    topic: Annotated[
        list[str] | None, Option(help="Topic or glob such as admin.users.*; may be repeated.")
    ] = None,
    archive: Archive = None,
) -> int | None:
    """Replay history under another retry policy, and compare dead letters, deliveries and time in queue.

    What is not given stays as it was. History can't say how a delivery would have ended that never was:
    figures that depend on such deliveries come as a range, from the best to the worst.
    """
    from postroom.application.queries.simulate_policy import Simulation
    from postroom.domain.what_if import Changes

    changes = Changes(
        max_attempts=max_attempts,
        backoff_base_ms=_ms(backoff_base),
        backoff_max_ms=_ms(backoff_max),
        visibility_ms=_ms(visibility),
    )
    if changes == Changes():
        raise WrongUsage(
            "Say what would have been different: --max-attempts, --backoff-base, --backoff-max, --visibility."
        )
    now = datetime.now(UTC)
    since, until = (None if text is None else parse_moment(text, now) for text in (start, end))
    names = session.mailboxes()
    if len(names) != 1 and (isinstance(since, int) or isinstance(until, int)):
        raise WrongUsage("A position is one of one mailbox's log; name the mailbox with --mailbox.")
    simulation = Simulation(changes, session.settings.policy)
    for name in names:
        with session.read(name, archive) as reader, session.out.progress(f"Replaying {name}") as move:
            reader.simulate_policy(
                simulation,
                start=since,
                end=until,
                topics=topic or (),
                progress=lambda position, move=move: move(position, f"position {position:,}"),  # type: ignore[misc]
            )
    compared = simulation.comparison()
    _show(session, compared)
    return None if compared.messages else NOTHING


def _ms(duration: str | None) -> int | None:
    return None if duration is None else parse_duration(duration)


def _show(session: Session, compared: "Comparison") -> None:
    if session.out.as_json:
        session.out.json(compared)
        return
    if not compared.messages:
        session.out.note("No message was sent to these topics at that time.")
        return
    rows = [_row(name, compared, field, "{:,}".format) for name, field in _COUNTS]
    rows += [_row(name, compared, field, format_duration) for name, field in _TIMES]
    session.out.table((f"of {compared.messages:,} messages", "was", "would have been"), rows)
    for line in _findings(compared):
        session.out.line(line)
    session.out.note(f"Assumed:\n{compared.assumptions}")


_COUNTS = (
    ("settled in the end", "settled"),
    ("dead in the end", "dead"),
    ("removed", "removed"),
    ("still waiting or in flight", "waiting"),
    ("ever a dead letter", "died"),
    ("deliveries", "deliveries"),
)
_TIMES = (
    ("time in queue, median", "queued_p50_ms"),
    ("time in queue, 95 of 100", "queued_p95_ms"),
    ("time in queue, longest", "queued_max_ms"),
)


def _row(name: str, compared: "Comparison", field: str, text: Callable[[float], str]) -> tuple[str, str, str]:
    was, *range_ = (getattr(each, field) for each in (compared.observed, compared.best, compared.worst))
    low, high = text(min(range_)), text(max(range_))
    return name, text(was), low if low == high else f"{low} to {high}"


def _findings(compared: "Comparison") -> list[str]:
    findings = [f"Nothing changes for {compared.unchanged:,} messages."]
    if compared.spared:
        findings.append(f"{compared.spared:,} that became dead letters would surely have been settled.")
    if compared.pending:
        findings.append(
            f"{compared.pending:,} that became dead letters would still have been waiting when the log ends."
        )
    if compared.doomed:
        findings.append(f"{compared.doomed:,} that did not become dead letters surely would have.")
    if compared.undecided:
        findings.append(
            f"{compared.undecided:,} would have had deliveries that history knows nothing of, up to "
            f"{compared.more_deliveries:,} in all: their end is unknown, so the figures are ranges."
        )
    return findings
