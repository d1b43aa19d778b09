"""`postroom report whatif`: the effects of other retry policies on all messages of a store."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from postroom.adapters.cli.exit_codes import NOTHING
from postroom.adapters.cli.filters import takes
from postroom.adapters.cli.report import ReportOptions, cell, compute, report_options, selection_of, show
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import WrongUsage, exact_duration, parse_duration
from postroom.application.extras import explain_missing_extra
from postroom.application.pluralize import pluralize

if TYPE_CHECKING:
    from postroom.domain.policy_simulation import Changes

_POLICY = ("attempts", "backoff_ms", "backoff_max_ms", "visibility_ms")
_RANGES = ("dead_lettered", "redeliveries", "queued_p50_ms", "queued_p95_ms")
_WIDE_RANGES = ("settled", "dead", "removed", "waiting", "deliveries", "queued_max_ms")
_COUNTS = ("unchanged", "avoided", "pending", "caused", "undecided", "more_deliveries")


@takes(report_options)
def whatif(
    session: Session,
    options: ReportOptions,
    attempts: Annotated[str, Option(metavar="N,...", help="Maximum deliveries of a message.")] = "",
    backoff: Annotated[
        str, Option(metavar="D,...", help="First backoffs, which double with each attempt.")
    ] = "",
    backoff_max: Annotated[str, Option(metavar="D,...", help="Longest backoffs.")] = "",
    visibility: Annotated[str, Option(metavar="D,...", help="Visibility timeouts.")] = "",
    by_topic: Annotated[bool, Option("--by-topic", help="One row per policy and topic.")] = False,
) -> int | None:
    """Report the effects of other retry policies: dead letters, redeliveries and time in queue.

    Each combination of the values is a policy, at most 60; omitted options keep their past values. The
    outcome of a delivery that never took place is unknown, so figures that depend on one are shown as a
    range from the best to the worst case. The first row is the actual history.
    """
    policies = _grid(attempts, backoff, backoff_max, visibility)
    with explain_missing_extra("reports"):
        from postroom.adapters.compose.reports import whatif_report

    report = whatif_report(
        session.existing_store(),
        policies,
        selection=selection_of(session, options),
        archive=options.archive,
    )
    rows = compute(session, report, options, {"by_topic": by_topic})
    listed = rows.to_pylist()
    show(session, report, rows, options, lambda: _table(session, listed))
    return None if listed else NOTHING


def _grid(attempts: str, backoff: str, backoff_max: str, visibility: str) -> "list[Changes]":
    from postroom.domain.policy_grid import policy_grid

    if not any((attempts, backoff, backoff_max, visibility)):
        raise WrongUsage("Pass at least one of --attempts, --backoff, --backoff-max and --visibility.")
    return policy_grid(
        max_attempts=_values("--attempts", attempts, _number),
        backoff_base_ms=_values("--backoff", backoff, parse_duration),
        backoff_max_ms=_values("--backoff-max", backoff_max, parse_duration),
        visibility_ms=_values("--visibility", visibility, parse_duration),
    )


def _values(option: str, text: str, parse: Callable[[str], int]) -> list[int]:
    """Return values separated by commas."""
    parts = [each.strip() for each in text.split(",")] if text else []
    if not all(parts):
        raise WrongUsage(f"{option} {text!r} has an empty value; write values separated by commas.")
    return [parse(each) for each in parts]


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise WrongUsage(f"--attempts: {text!r} is not a number of deliveries; write numbers such as 3,5,8.")
    return int(text)


def _table(session: Session, rows: list[dict[str, Any]]) -> None:
    from postroom.adapters.cli.tables import Id, Prose

    has_topics = any(row["topic"] is not None for row in rows)
    headings = [
        *(("topic",) if has_topics else ()),
        *("policy", "messages"),
        *map(_heading, (*_RANGES, *_COUNTS, *_WIDE_RANGES)),
    ]
    cells = [
        [
            *((row["topic"],) if has_topics else ()),
            *(Prose(_policy_text(row)), row["messages"]),
            *(Id(_range(name, row)) for name in _RANGES),
            *(row[name] for name in _COUNTS),
            *(_range(name, row) for name in _WIDE_RANGES),
        ]
        for row in rows
    ]
    session.out.table(headings, cells, only_wide=["messages", *map(_heading, (*_COUNTS, *_WIDE_RANGES))])
    messages = sum(row["messages"] for row in rows if all(row[name] is None for name in _POLICY))
    session.out.note(
        f"{pluralize(messages, 'message')}; a range is from the best to the worst case, lower first"
    )


def _policy_text(row: dict[str, Any]) -> str:
    """Return the values that define the policy of a row."""
    texts = [
        f"{_option(name)}={exact_duration(row[name]) if name.endswith('_ms') else row[name]}"
        for name in _POLICY
        if row[name] is not None
    ]
    return " ".join(texts) or "actual"


def _option(name: str) -> str:
    return name.removesuffix("_ms").replace("_", "-")


def _heading(name: str) -> str:
    return {"dead_lettered": "dead letters"}.get(name, name.removesuffix("_ms").replace("_", " "))


def _range(name: str, row: dict[str, Any]) -> str:
    """Return a figure as a range from the best to the worst case, or one value if both are equal."""
    stem, unit = name.removesuffix("_ms"), "_ms" if name.endswith("_ms") else ""
    figures = sorted(row[f"{stem}_{case}{unit}"] for case in ("best", "worst"))
    low, high = (f"{each:,}" if isinstance(each, int) else str(cell(name, each)) for each in figures)
    return low if low == high else f"{low}-{high}"
