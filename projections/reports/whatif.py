"""The report `whatif`: a query over the outcomes of messages under each policy of a grid."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from postroom.application.queries.mailbox_past import MailboxPast
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.message import (
    Headers,
    MessageAcked,
    MessageDeadLettered,
    MessageEvent,
    MessageExpired,
    MessageReceived,
    MessageRedriven,
    MessageRequeued,
    MessageRescheduled,
    MessageSent,
    MessageVisibilityExtended,
)
from postroom.domain.message_history import MessageHistory
from postroom.domain.policy import Changes
from postroom.domain.policy_grid import MAX_POLICIES, GridOutcomes, effect_of, simulate_grid
from postroom.domain.policy_simulation import observe
from postroom.projections.models.messages import EVENTS
from postroom.projections.reports.report import EventRow, HeatMap, MessageRows, Report, sql_of

NAME = "whatif"
_OUTCOME = ("status", "deliveries", "dead_letterings", "queued")
_ROW = pa.schema(
    [
        ("topic", pa.string()),
        ("sent_at", pa.int64()),
        ("policies", pa.int64()),
        ("effect", pa.string()),
        ("assumed", pa.int64()),
        *(
            (f"{case}_{name}", pa.string() if name == "status" else pa.int64())
            for case in ("best", "worst")
            for name in _OUTCOME
        ),
    ]
)
_POLICY = ("attempts", "backoff_ms", "backoff_max_ms", "visibility_ms")
_EVENT = ("position", "event", "at", "topic", "attempt", "due", "expires_at", "reason", "version", "epoch")
_HEADERS = Headers(0)


@dataclass(frozen=True)
class PolicyOutcomes:
    """The outcomes of messages under each policy of a grid, as rows; it is pickled and sent to tasks.

    Bit 0 of the column `policies` is the actual history, bit n the n-th policy.

    Arguments:
        grid: the policies.
        pasts: history of each mailbox.
    """

    grid: tuple[Changes, ...]
    pasts: Mapping[str, MailboxPast]

    def __call__(self, mailbox: str, stream: bytes, events: Iterable[EventRow]) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of one message; see `MessageRows`."""
        past = self.pasts.get(mailbox)
        if past is None:  # created after the report was started
            return
        for history in past.histories(_events(stream, events)):
            yield from self._rows(history, past.end)

    def _rows(self, history: MessageHistory, end: int) -> Iterator[tuple[Any, ...]]:
        actual = observe(history, end)
        unchanged = 1
        changed: list[GridOutcomes] = []
        for outcomes in simulate_grid(history, self.grid, end):
            if outcomes.best == actual == outcomes.worst:
                unchanged |= outcomes.policies << 1
            else:
                changed.append(outcomes._replace(policies=outcomes.policies << 1))
        for policies, best, worst in (GridOutcomes(unchanged, actual, actual), *changed):
            cases = (getattr(outcome, name) for outcome in (best, worst) for name in _OUTCOME)
            effect = effect_of(actual, best, worst)
            yield (history.topic, history.sent.at, policies, effect, worst.assumed, *cases)


def whatif_report(grid: Sequence[Changes], pasts: Mapping[str, MailboxPast]) -> Report:
    """Return the report on the effects of each policy of a grid.

    Arguments:
        pasts: history of each mailbox that is read.

    Raises: InvalidRequest for more than 60 policies, or a policy that is not a `Changes`.
    """
    for number, changes in enumerate(grid):
        check_type(f"policies[{number}]", changes, Changes)
    if len(grid) > MAX_POLICIES:
        raise InvalidRequest(f"There are {len(grid):,} policies; pass at most {MAX_POLICIES}.")
    names = ("max_attempts", "backoff_base_ms", "backoff_max_ms", "visibility_ms")
    policies = ((None,) * len(names), *(tuple(getattr(each, name) for name in names) for each in grid))
    values = ", ".join(
        f"({number}, {', '.join(map(_literal, (1 << number, *policy)))})"
        for number, policy in enumerate(policies)
    )
    return Report(
        NAME,
        "Effects of other retry policies",
        sql_of("whatif").replace("{policies}", values),
        reads=("mailbox", "stream", *_EVENT),
        events=EVENTS,
        charts=(
            HeatMap("Dead letters, worst case", "dead_lettered_worst", _POLICY),
            HeatMap("Dead letters, best case", "dead_lettered_best", _POLICY),
            HeatMap("Redeliveries, worst case", "redeliveries_worst", _POLICY),
            HeatMap("Time in queue, p95, worst case", "queued_p95_worst_ms", _POLICY, unit="ms"),
        ),
        only_wide=(
            "unchanged",
            "avoided",
            "pending",
            "caused",
            "undecided",
            "more_deliveries",
            *_cases("settled", "dead", "removed", "waiting", "deliveries", "queued_max_ms"),
        ),
        follows=True,
        messages=MessageRows(PolicyOutcomes(tuple(grid), pasts), _ROW),
        defaults={"by_topic": 0},
    )


def _cases(*figures: str) -> list[str]:
    """Return the column names of figures in the best and in the worst case."""
    return [
        f"{stem}_{case}{figure.removeprefix(stem)}"
        for figure in figures
        for case in ("best", "worst")
        for stem in (figure.removesuffix("_ms"),)
    ]


def _literal(value: int | None) -> str:
    return "CAST(NULL AS BIGINT)" if value is None else f"CAST({value} AS BIGINT)"


def _events(stream: bytes, rows: Iterable[EventRow]) -> Iterator[tuple[int, int, MessageEvent]]:
    """Yield position, epoch and event of the rows of one message."""
    for position, event, at, topic, attempt, due, expires_at, reason, version, epoch in rows:
        own = (stream, version, at)
        match event:
            case "MessageSent":
                # Shard, payload and headers have no effect on a simulation.
                message_event: MessageEvent = MessageSent(
                    *own, topic, 0, due, expires_at, 0, None, b"", b"", _HEADERS, b""
                )
            case "MessageReceived":
                message_event = MessageReceived(*own, attempt, due, None)
            case "MessageVisibilityExtended":
                message_event = MessageVisibilityExtended(*own, attempt, due)
            case "MessageAcked":
                message_event = MessageAcked(*own, attempt)
            case "MessageRequeued":
                message_event = MessageRequeued(*own, attempt, due, reason, None)
            case "MessageDeadLettered":
                message_event = MessageDeadLettered(*own, attempt, reason, None, expires_at)
            case "MessageRedriven":
                message_event = MessageRedriven(*own, due, expires_at)
            case "MessageRescheduled":
                message_event = MessageRescheduled(*own, due, expires_at)
            case _:
                message_event = MessageExpired(*own, reason)
        yield position, epoch, message_event
