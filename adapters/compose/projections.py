"""Read models of a store: rebuild, follow and verify them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from threading import Event

from msgspec.structs import replace

from postroom.adapters.compose.queries import open_clickhouse, open_target, read_mailbox
from postroom.adapters.compose.store import Store, archive_address, open_log_reader, open_store
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.application.messaging import ContextBacklogRefresher
from postroom.application.metrics import Monitor
from postroom.domain.mailbox.counts import TopicCount
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.projections.engine import Engine, EngineChoice, EngineSettings, find_engine
from postroom.projections.follow import Follower, follow_monitor
from postroom.projections.incremental import MAX_EVENTS, FollowCounts
from postroom.projections.ports.read_model_store import ReadModelUpdater
from postroom.projections.ports.runner import Progress, TaskRunner
from postroom.projections.rebuild import RebuildReport, RebuildRequest, rebuild
from postroom.projections.spark.session import SparkTaskRunner
from postroom.projections.tasks import LocalTaskRunner
from postroom.projections.verify import VerifyReport, verify

__all__ = [
    "MAX_EVENTS",
    "FollowCounts",
    "LocalTaskRunner",
    "MessagingSettings",
    "Progress",
    "RunningFollower",
    "context_backlogs",
    "make_follower",
    "open_follower",
    "rebuild_projections",
    "roll_back_projections",
    "verify_projections",
]


class RunningFollower:
    """A follower of a store's read models."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._stop = Event()

    @property
    def counts(self) -> FollowCounts:
        """Return the counters."""
        return self._follower.counts

    def stop(self) -> None:
        """End `run`; a batch in progress is rolled back."""
        self._stop.set()

    def run(self, *, once: bool = False) -> None:
        """Follow until stopped, through outages of the store; see `Follower.run`."""
        self._follower.run(self._stop, once=once)

    @property
    def monitor(self) -> Monitor:
        """Return the metrics and the readiness of the follower."""
        return follow_monitor(self._follower)


def open_updater(store: Store, into: str | None = None) -> ReadModelUpdater:
    """Return the updater of a store's read models; see `make_follower`."""
    if into is None:
        return store.read_model_updater()
    database = open_clickhouse(into, "can't be followed")
    from postroom.adapters.clickhouse.read_model_updater import ClickHouseReadModelUpdater

    return ClickHouseReadModelUpdater(database, store.followed_log())


def make_follower(
    store: Store, *, version: int | None = None, max_events: int = MAX_EVENTS, into: str | None = None
) -> Follower:
    """Return a follower of a store's read models; see `Follower`.

    Arguments:
        into: `clickhouse:` or `chdb:` address of read models outside of the store; None follows the store's
            own.
    """
    return Follower(
        open_updater(store, into),
        lambda archive: open_log_reader(store, archive),
        version=version,
        max_events=max_events,
    )


@contextmanager
def open_follower(
    address: str, *, max_events: int = MAX_EVENTS, into: str | None = None
) -> Iterator[RunningFollower]:
    """Open a follower of a store while the context lasts.

    Arguments:
        address: of the store.
        max_events: maximum number of records in a batch.
        into: see `make_follower`.
    """
    with closing(make_follower(open_store(address), max_events=max_events, into=into)) as follower:
        yield RunningFollower(follower)


def projection_engine(
    address: str,
    engine: Engine | EngineChoice,
    settings: EngineSettings | None = None,
    *,
    archive: str | None = None,
) -> EngineChoice:
    """Return the engine of a rebuild or a verification; see `find_engine` and `rebuild_projections`."""
    log = open_log_reader(open_store(address), archive)
    return find_engine(engine, lambda: sum(each.events for each in log.extents()), settings)


def rebuild_projections(
    address: str,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    only: Sequence[str] = (),
    to_position: Sequence[str] = (),
    compare: bool = False,
    archive: str | None = None,
    into: str | None = None,
    bodies: BodyRules = NO_BODIES,
    restart: bool = False,
    verify: bool = False,
    allow_gaps: bool = False,
    engine: Engine | EngineChoice = "auto",
    runner: TaskRunner | None = None,
) -> RebuildReport:
    """Rebuild the read models of a store, and make them the active version.

    Arguments:
        address: of the store.
        archive: folder or URL of the log archive, which the rebuild and the followers of the new version read
            as the log's beginning. It is an argument, as in `open_mailbox`, because functions read no
            settings.
        into: a target instead of the store's own read models; see `open_target`.
        engine: `local`, this process; `spark`; or `auto`, which takes Spark for logs of more than 10 million
            records where pyspark and Java are installed, and for a process that `spark-submit` started.
        runner: runs the tasks instead of the engine's runner.
        progress: called repeatedly with what has been read, from this thread.
        only: names of the models to rebuild; empty for all.
        to_position: positions of the logs at which to stop, each `N` or `MAILBOX:N`.
        compare: count the rows that differ from the active version.
        bodies: topics whose bodies are searched for words.
        restart: start over, instead of continuing an interrupted rebuild.
        verify: check the hashes of the log while it is read.
        allow_gaps: build even if records are missing from a log.
    """
    store = open_store(address)
    archive = None if archive is None else archive_address(archive)
    choice = projection_engine(address, engine, archive=archive)
    report = rebuild(
        open_log_reader(store, archive, allow_gaps=allow_gaps, verify=verify),
        store.read_model_store() if into is None else open_target(into),
        runner or _runner(choice),
        (lambda version: make_follower(store, version=version)) if into is None else None,
        RebuildRequest(only, to_position, compare, archive, bodies, restart, verify, allow_gaps),
        progress,
    )
    return replace(report, computed_by=choice) if runner is None else report


def verify_projections(
    address: str,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    archive: str | None = None,
    chain: bool = True,
    engine: Engine | EngineChoice = "auto",
    runner: TaskRunner | None = None,
) -> VerifyReport:
    """Compare the read models of a store with its log.

    Arguments:
        address, archive, engine, runner: as for `rebuild_projections`.
        chain: also check the hashes of the log.
        progress: called repeatedly with what has been read, from this thread.
    """

    def backlog_at(mailbox: str, position: int) -> list[TopicCount]:
        with read_mailbox(address, mailbox) as reader:
            return reader.get_backlog(at=position).shards

    store = open_store(address)
    choice = projection_engine(address, engine, archive=archive)
    report = verify(
        open_log_reader(store, archive, verify=chain),
        store.read_model_store(),
        runner or _runner(choice),
        backlog_at=backlog_at,
        chain=chain,
        progress=progress,
    )
    return replace(report, computed_by=choice) if runner is None else report


def _runner(choice: EngineChoice) -> TaskRunner:
    return LocalTaskRunner() if choice.engine == "local" else SparkTaskRunner()


def roll_back_projections(address: str, to: int | None = None) -> int:
    """Make an earlier version of a store's read models active again, and return its number.

    Arguments:
        address: of the store.
        to: number of the version; None takes the one before the active one.
    """
    return open_store(address).read_model_store().roll_back(to)


def context_backlogs(store: str, messaging: MessagingSettings) -> ContextBacklogRefresher:
    """Return the refresher of the backlog of a context's outbox and inbox.

    Arguments:
        store: path of a SQLite store, or URL of a PostgreSQL one.
        messaging: the context, and the service's own database.
    """
    from postroom.adapters.postgres.messaging.inbox_queue import count_backlog  # psycopg is an extra

    return ContextBacklogRefresher(
        lambda: count_backlog(messaging.database, messaging.context, messaging.tables),
        open_store(store).save_context_backlog,
        messaging.context,
    )
