"""The policy simulator: replays the latest events of the log under another retry policy."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from markupsafe import Markup
from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import number, parse_number, span
from postroom.application.queries.simulate_policy import Comparison, Replay, SimulatePolicy
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Saturated
from postroom.domain.policy import Changes, TopicPolicy

NAV: Final = NavEntry("What-if", "/what-if", 60, group="Operations", key="w")
EVENTS: Final = 5_000
SIZES: Final = (1_000, EVENTS, 20_000, 100_000)
"""Choices for the number of the latest events to replay."""
TOPIC_CHARS: Final = 255
RETRY_MS: Final = 2_000


class Slider(NamedTuple):
    """A field of a policy; the slider covers common values, the number field all valid ones."""

    name: str
    label: str
    minimum: int
    maximum: int
    hint: str = ""


SLIDERS: Final = (
    Slider("max_attempts", "Attempts", 1, 50, "Deliveries before a message is dead-lettered"),
    Slider("backoff_base_ms", "First backoff, ms", 10, 600_000, "It doubles with each attempt"),
    Slider("backoff_max_ms", "Longest backoff, ms", 100, 86_400_000),
    Slider(
        "visibility_ms", "Visibility timeout, ms", 250, 3_600_000, "How long a delivery is hidden from others"
    ),
)
NAMES: Final = ("topic", "events", *(each.name for each in SLIDERS))
_busy: WeakSet[object] = WeakSet()
"""Consoles in which a simulation is running; each runs one at a time, as it is CPU-bound."""


async def what_if(page: Page) -> Response:
    """Show the form, and the outcome if a field is set; to htmx, only the outcome."""
    await page.check(Right.READ_HEADERS)
    values = {name: page.query.get(name, "") for name in NAMES}
    values["events"] = values["events"] or str(EVENTS)
    error: PostroomError | None = None
    replay: Replay | None = None
    status = 200
    try:
        topic = values["topic"].strip()
        changes = Changes(**{each.name: parse_number(each.label, values[each.name]) for each in SLIDERS})
        if changes != Changes():
            _check_topic(page, topic)
            replay = await _replay(page, topic, changes, _size(values["events"]))
    except (InvalidRequest, NotFound, Saturated) as problem:
        error, status = problem, problem.status
    facts: dict[str, Any] = {
        "error": error,
        "replay": replay,
        "charts": [] if replay is None else outcome_charts(replay.comparison),
        "cases": [label for label, _, _ in CASES],
    }
    if page.is_fragment:
        return HTMLResponse(page.part("what_if/outcome", **facts), status)
    policy = await _policy(page, values["topic"].strip())
    return await page.render(
        "what_if/page",
        status,
        **facts,
        values=values,
        topics=[each.topic for each in await page.mailbox.list_topics()][:500],
        sliders=[(each, getattr(policy, each.name)) for each in SLIDERS],
        sizes=[(each, f"The latest {each:,}") for each in SIZES],
        has_log=page.data.log is not None,
    )


async def _replay(page: Page, topic: str, changes: Changes, size: int) -> Replay:
    log = page.data.log
    if log is None:
        raise NotFound(
            "The log of this mailbox is not readable from this process, so its history can't be replayed."
        )
    if page.console in _busy:
        raise Saturated(
            "Another simulation is running in this console; try again in a few seconds.", RETRY_MS
        )

    async def read() -> Replay:
        await page.check(Right.READ_HEADERS)
        return await page.blocking(
            SimulatePolicy(log).replay_latest, changes, size, (topic,) if topic else ()
        )

    _busy.add(page.console)
    try:
        return await page.session.audit(
            Right.READ_HEADERS,
            read,
            lambda replay: replay.comparison.messages,
            topics=(topic,) if topic else (),
            criteria=("simulation",),
        )
    finally:
        _busy.discard(page.console)


async def _policy(page: Page, topic: str) -> TopicPolicy:
    """Return the current policy of a topic that the caller may see, or the usual policy."""
    if topic and "*" not in topic and page.grant.covers(topic):
        with suppress(InvalidRequest):
            return await page.mailbox.get_topic_policy(topic)
    return TopicPolicy()


def _check_topic(page: Page, topic: str) -> None:
    """Raise unless the caller may read the history of a topic, or of all topics."""
    if len(topic) > TOPIC_CHARS:
        raise InvalidRequest(f"The topic has {len(topic):,} characters; give at most {TOPIC_CHARS}.")
    if not page.grant.covers_all_topics and (not topic or not page.grant.covers(topic)):
        raise uncovered_topic() if topic else InvalidRequest("Name a topic: your token is limited to topics.")


def _size(text: str) -> int:
    size = parse_number("Events", text)
    if size not in SIZES:
        raise InvalidRequest(f"The number of events is {text[:40]!r}; choose one from the list.")
    return size


# -- charts of the outcome ---

LABEL_PERCENT: Final = 24
BAR_PERCENT: Final = 56
ROW: Final = 24
"""Height in pixels; widths are percentages, so that text has the same size in any window."""
CASES: Final = (("Recorded", "observed", 1), ("Best case", "best", 2), ("Worst case", "worst", 4))


class Measure(NamedTuple):
    """A figure that a chart compares.

    Arguments:
        field: name of the figure's field in `Figures`.
        write: formats a value.
    """

    title: str
    field: str
    write: Callable[[float | None], str]


MEASURES: Final = (
    Measure("Dead-lettered messages", "dead_lettered", number),
    Measure("Settled messages", "settled", number),
    Measure("Still waiting", "waiting", number),
    Measure("Deliveries", "deliveries", number),
    Measure("Time in the queue, median", "queued_p50_ms", span),
    Measure("Time in the queue, 95 %", "queued_p95_ms", span),
)


class OutcomeChart(NamedTuple):
    """A chart of a measure, and its values by case, as text."""

    title: str
    svg: Markup
    texts: list[str]


def outcome_charts(comparison: Comparison) -> list[OutcomeChart]:
    """Return a chart for each measure."""
    return [_chart(each, comparison) for each in MEASURES]


def _chart(measure: Measure, comparison: Comparison) -> OutcomeChart:
    values = [float(getattr(getattr(comparison, case), measure.field)) for _, case, _ in CASES]
    texts = [measure.write(value) for value in values]
    top = max(values)
    rows = [
        _bar(index, label, colour, text, value / top if top > 0 else 0.0)
        for index, ((label, _, colour), text, value) in enumerate(zip(CASES, texts, values, strict=True))
    ]
    what = ", ".join(f"{label}: {text}" for (label, _, _), text in zip(CASES, texts, strict=True))
    svg = Markup('<svg class="outcome" role="img" aria-label="{}. {}">{}{}</svg>').format(
        measure.title, what, Markup("").join(rows), _ZERO
    )
    return OutcomeChart(measure.title, svg, texts)


def _bar(index: int, label: str, colour: int, text: str, share: float) -> Markup:
    width = BAR_PERCENT * share
    return Markup(
        '<g class="series-{}"><text class="chart-label" x="0" y="{}">{}</text>'
        '<rect class="chart-bar" x="{}%" y="{}" width="{:.1f}%" height="{}"/>'
        '<text class="chart-label" x="{:.1f}%" dx="6" y="{}">{}</text></g>'
    ).format(
        colour,
        index * ROW + 16,
        label,
        LABEL_PERCENT,
        index * ROW + 6,
        width,
        ROW - 12,
        LABEL_PERCENT + width,
        index * ROW + 16,
        text,
    )


_ZERO: Final = Markup('<line class="plot-zero" x1="{0}%" x2="{0}%" y1="0" y2="{1}"/>').format(
    LABEL_PERCENT, ROW * len(CASES)
)
"""The axis from which the bars begin."""


ROUTES: Final = [route("/what-if", what_if, query=NAMES)]
