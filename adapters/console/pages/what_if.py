"""The policy simulator: replays the latest events of the log under another retry policy."""

from contextlib import suppress
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from starlette.responses import HTMLResponse, Response

from postroom.adapters.console.charts import outcome_charts
from postroom.adapters.console.page import NavEntry, Page, route
from postroom.adapters.console.values import parse_number
from postroom.application.queries.simulate_policy import Replay, SimulatePolicy
from postroom.domain.capability.access import uncovered_topic
from postroom.domain.capability.rights import Right
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError, Saturated
from postroom.domain.policy import TopicPolicy
from postroom.domain.policy_simulation import Changes

NAV: Final = NavEntry("What-if", "/what-if", 60)
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
_busy: WeakSet[object] = WeakSet()
"""Consoles in which a simulation is running; each runs one at a time, as it is CPU-bound."""


async def what_if(page: Page) -> Response:
    """Show the form, and the outcome if a field is set; to htmx, only the outcome."""
    await page.check(Right.READ_HEADERS)
    values = {
        name: page.query.get(name, "") for name in ("topic", "events", *(each.name for each in SLIDERS))
    }
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


ROUTES: Final = [route("/what-if", what_if)]
