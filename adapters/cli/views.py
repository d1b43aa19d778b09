"""`postroom views`: rebuild, follow, verify and roll back the read models."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from typing import TYPE_CHECKING, Annotated, cast

import msgspec
from typer import Option

from postroom.adapters.cli.filters import From
from postroom.adapters.cli.segments import building_ahead
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.cli.values import REFUSED, Archive, MetricsPort, WrongUsage
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize
from postroom.domain.errors import NotFound, Unavailable
from postroom.domain.names import describe_choices
from postroom.projections.engine import ENGINES, Engine, EngineChoice, EngineSettings

if TYPE_CHECKING:
    from postroom.adapters.compose.projections import MessagingSettings, RunningFollower
    from postroom.application.ports.read_models import ProjectionStatus
    from postroom.domain.search import BodyRules


MAX_PARKED_LIMIT = 10_000
"""Maximum number of parked records that `--parked` lists."""
DEFAULT_PARKED_LIMIT = 5
FOLLOWED_RECORDS = 300_000
"""Maximum number of log records in a batch of the follower."""

EngineOption = Annotated[
    str,
    Option(
        "--engine",
        metavar="auto|local|spark",
        help="local: this process; spark: all cores, or a cluster; auto: spark for a large log. [engine]",
    ),
]


class SearchSettings(msgspec.Struct, frozen=True):
    """Settings of `[search]`.

    Arguments:
        bodies: topics, or globs such as `github.*`, whose bodies are searched for words.
    """

    bodies: tuple[str, ...] = ()


def rebuild(
    session: Session,
    only: Annotated[
        str,
        Option(metavar="MODEL,...", help="Rebuild only these models; `search` is an alias of `mailbox`."),
    ] = "",
    to_position: Annotated[
        list[str] | None,
        Option(metavar="[MAILBOX:]N", help="Stop at this log position; may be repeated, once per mailbox."),
    ] = None,
    compare: Annotated[
        bool, Option("--compare", help="Count the rows that differ from the active version.")
    ] = False,
    into: Annotated[
        str | None,
        Option(metavar="TARGET", help="Write to parquet:, clickhouse: or chdb: instead of the store."),
    ] = None,
    archive: Archive = None,
    restart: Annotated[
        bool, Option("--restart", help="Start over instead of resuming an interrupted rebuild.")
    ] = False,
    engine: EngineOption = "auto",
    verify: Annotated[
        bool, Option("--verify", help="Check the hashes of all commits and envelopes that are read.")
    ] = False,
    allow_gaps: Annotated[
        bool, Option("--allow-gaps", help="Go on when records are missing from a log.")
    ] = False,
) -> None:
    """Rebuild the read models from the logs, and switch to the new version when it is complete."""
    archive = session.archive(archive)
    choice = _choose_engine(session, engine, archive)
    from postroom.adapters.compose.projections import rebuild_projections

    with session.out.progress(choice.summary()) as advance:
        report = rebuild_projections(
            session.existing_store(),
            lambda at: advance(at.done / at.total if at.total else 0, at.summary()),
            only=[name.strip() for name in only.split(",") if name.strip()],
            to_position=to_position or (),
            compare=compare,
            archive=archive,
            into=into,
            bodies=body_rules(session),
            restart=restart,
            verify=verify,
            allow_gaps=allow_gaps,
            engine=choice,
        )
    session.out.result(report, *report.summary().splitlines())


def status(
    session: Session,
    parked: Annotated[
        bool, Option("--parked", help="List all parked log records instead of the first 5.")
    ] = False,
    source: From = None,
) -> None:
    """Show the active version of the read models, its lag, and the parked log records."""
    from postroom.adapters.compose.queries import read_projections

    with read_projections(session.existing_store(), source) as projections:
        current = projections.get_projection_status(MAX_PARKED_LIMIT if parked else DEFAULT_PARKED_LIMIT)
    if session.out.as_json:
        session.out.json(current)
    else:
        _show_status(session, current)


def verify(
    session: Session,
    archive: Archive = None,
    engine: EngineOption = "auto",
    chain: Annotated[
        bool, Option("--chain/--no-chain", help="Also check the hashes of all commits and envelopes.")
    ] = True,
) -> int | None:
    """Recompute the read models from the logs, and compare them with the active version."""
    archive = session.archive(archive)
    choice = _choose_engine(session, engine, archive)
    from postroom.adapters.compose.projections import verify_projections

    with session.out.progress(choice.summary()) as advance:
        report = verify_projections(
            session.existing_store(),
            lambda at: advance(at.done / at.total if at.total else 0, at.summary()),
            archive=archive,
            chain=chain,
            engine=choice,
        )
    session.out.result(report, *report.summary().splitlines())
    return None if report.is_intact else REFUSED


def roll_back(
    session: Session,
    to: Annotated[
        int | None, Option(metavar="VERSION", help="Version to make active; default: the previous one.")
    ] = None,
) -> None:
    """Make an earlier version of the read models active again, at once."""
    from postroom.adapters.compose.projections import roll_back_projections

    version = roll_back_projections(session.existing_store(), to)
    session.out.result({"version": version}, f"Version {version} is active again")


def body_rules(session: Session) -> "BodyRules":
    """Return which topics' bodies are searched, by the settings.

    Raises: InvalidSettings for an empty topic.
    """
    from postroom.domain.search import BodyRules

    topics = session.settings.section("search", SearchSettings).bodies
    if "" in topics:
        raise InvalidSettings(f"[search] in {session.settings.file}: bodies contains an empty topic.")
    return BodyRules(topics)


def check_engine(engine: str) -> Engine:
    """Return the value of `--engine`; raise WrongUsage for an unknown one."""
    if engine not in ENGINES:
        raise WrongUsage(f"Unknown --engine {engine!r}; expected {', '.join(ENGINES[:-1])} or {ENGINES[-1]}.")
    return cast(Engine, engine)


def _choose_engine(session: Session, engine: str, archive: str | None) -> EngineChoice:
    checked = check_engine(engine)
    with explain_missing_extra("spark" if engine == "spark" else "views"):
        from postroom.adapters.compose.projections import projection_engine

    settings = session.settings.section("engine", EngineSettings)
    return projection_engine(session.existing_store(), checked, settings, archive=archive)


def _show_status(session: Session, current: "ProjectionStatus") -> None:
    from postroom.adapters.cli.output import Time

    out = session.out
    out.table(
        ("mailbox", "position", "log end", "lag", "seconds"),
        [
            (lag.mailbox, lag.position, lag.head, lag.lag, f"{lag.seconds:.1f}" if lag.lag else None)
            for lag in current.lags
        ],
    )
    for lag in current.lags:
        if not lag.is_same_log:
            out.line(f"{lag.mailbox}: the log was replaced or cut since; rebuild with postroom views rebuild")
    if current.active is not None:
        out.line("followed: " + ("yes" if current.is_following else "no"))
    if current.parked:
        out.line(f"parked: {pluralize(current.parked, 'log record')} that could not be projected")
        out.table(
            ("mailbox", "position", "event", "error"),
            [(each.mailbox, each.position, each.type, each.error) for each in current.parked_records],
        )
    out.table(
        ("version", "status", "age", "messages", "seconds", "error"),
        [
            (
                each.version,
                each.status,
                None if each.finished_at is None else Time(each.finished_at),
                each.counts.get("mailbox"),
                round(sum(each.seconds.values()), 1),
                each.error,
            )
            for each in current.versions
        ],
    )
    if current.active is None:
        out.note("There is no version yet; run postroom views rebuild.")


Database = Annotated[
    str | None,
    Option("--messaging", metavar="URL", help="Database of the service. [messaging.database]"),
]
Context = Annotated[
    str | None, Option("--context", metavar="NAME", help="Name of the context. [messaging.context]")
]


def contexts(session: Session, database: Database = None, context: Context = None) -> None:
    """Show the backlog of the outbox and the inbox of each context, as of the last count.

    The configured context is counted now; `postroom views follow` counts it every few seconds.
    """
    from postroom.adapters.cli.output import Time
    from postroom.adapters.compose.projections import context_backlogs
    from postroom.adapters.compose.queries import open_read_models

    store = session.existing_store()
    messaging = messaging_settings(session, database, context)
    if messaging is not None:
        context_backlogs(store, messaging).refresh()
    with closing(open_read_models(store)) as models:
        backlogs = models.contexts()
    if context is not None and context not in (names := {each.context for each in backlogs}):
        raise NotFound(f"There is no context {context}; {describe_choices(context, names)}")
    session.out.records(
        {"contexts": backlogs},
        ("context", "box", "waiting", "parked", "oldest", "counted"),
        backlogs,
        lambda each: (
            each.context,
            each.box,
            each.count,
            each.parked,
            None if each.oldest_at is None else Time(each.oldest_at, each.as_of),
            Time(each.as_of),
        ),
    )


@contextmanager
def refresh_contexts(session: Session, store: str) -> Iterator[None]:
    """Refresh the backlog of the configured context, if there is one, until the context manager exits."""
    messaging = messaging_settings(session)
    if messaging is None:
        yield
        return
    from postroom.adapters.compose.projections import context_backlogs

    backlogs = context_backlogs(store, messaging)
    with backlogs.refreshing():
        yield


def messaging_settings(
    session: Session, database: str | None = None, context: str | None = None
) -> "MessagingSettings | None":
    """Return the database and context of the service; None if no database is configured."""
    if database is None and "database" not in session.settings.sections.get("messaging", {}):
        return None
    from postroom.adapters.compose.projections import MessagingSettings

    flags = {"database": database, "context": context}
    return session.settings.section("messaging", MessagingSettings, flags)


async def follow(
    session: Session,
    once: Annotated[bool, Option("--once", help="Catch up with the log, then exit.")] = False,
    batch: Annotated[
        int, Option(metavar="N", min=1, help="Maximum number of log records in a batch.")
    ] = FOLLOWED_RECORDS,
    into: Annotated[
        str | None,
        Option(metavar="TARGET", help="Update read models in clickhouse: or chdb: instead of the store's."),
    ] = None,
    metrics_port: MetricsPort = None,
) -> None:
    """Apply new log records to the read models continuously, until interrupted.

    One process at a time follows a store into one place; others stand by to take over. A rebuild may run
    at the same time.
    """
    from postroom.adapters.cli.running import monitoring, opened, running

    async with opened(lambda: open_running_follower(session, batch, into), is_patient=not once) as follower:
        with monitoring(session, metrics_port, follower.monitor):
            async with running(session, follower.stop):
                if not once:
                    session.out.note(f"Following {session.shown_store}.")
                await asyncio.to_thread(lambda: follower.run(once=once))
    counts = follower.counts
    session.out.result(
        counts,
        f"Version {counts.version}: {pluralize(counts.events, 'log record')} "
        f"in {pluralize(counts.batches, 'batch', 'batches')} "
        f"({counts.seconds:.1f} s), {counts.parked:,} parked",
    )


@asynccontextmanager
async def open_running_follower(
    session: Session, batch: int, into: str | None
) -> "AsyncIterator[RunningFollower]":
    """Open the follower; raise Unavailable while the store, whose folder exists, is not created yet."""
    try:
        store = session.existing_store()
    except NotFound as error:
        session.writable_store()
        raise Unavailable(f"There is no store at {session.store} yet; `follow` waits for it.") from error
    from postroom.adapters.compose.projections import open_follower

    with (
        open_follower(store, max_events=batch, into=into) as follower,
        refresh_contexts(session, store),
        building_ahead(session, store),
    ):
        yield follower


class ViewsThread:
    """The follower of the read models, in a thread."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._follower: RunningFollower | None = None
        self._is_stopped = False

    async def run(self) -> None:
        """Apply new log records to the read models until stopped."""
        async with open_running_follower(self._session, FOLLOWED_RECORDS, None) as follower:
            self._follower = follower
            if not self._is_stopped:
                await asyncio.to_thread(follower.run)

    def stop(self) -> None:
        """End after the current batch."""
        self._is_stopped = True
        if self._follower is not None:
            self._follower.stop()
