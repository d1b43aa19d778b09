"""Wiring of rebuilds and verifications; separate, because polars and PyArrow are slow to import."""

from collections.abc import Callable, Sequence

from postroom.adapters.compose.follow import make_follower
from postroom.adapters.compose.queries import read_mailbox
from postroom.adapters.compose.store import open_log_reader, open_store
from postroom.adapters.compose.targets import open_target
from postroom.domain.mailbox.counts import TopicCount
from postroom.domain.search import NO_BODIES, BodyRules
from postroom.projections.local_runner import LocalRunner
from postroom.projections.ports.runner import Runner
from postroom.projections.progress import Progress
from postroom.projections.rebuild import RebuildReport, rebuild
from postroom.projections.spark.runner import SparkRunner
from postroom.projections.verify import VerifyReport, verify

__all__ = ["LocalRunner", "Progress", "rebuild_projections", "roll_back_projections", "verify_projections"]


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
    runner: Runner | None = None,
) -> RebuildReport:
    """Rebuild the read models of a store; see `postroom.projections.rebuild.rebuild`.

    Arguments:
        address: of the store.
        archive: folder of the records that retention removed, to be read as the log's beginning.
        into: a target instead of the store's own read models; see `open_target`.
        runner: Spark by default.
    """
    store = open_store(address)
    return rebuild(
        open_log_reader(store, archive, allow_gaps=allow_gaps),
        store.read_model_store() if into is None else open_target(into),
        runner or SparkRunner(),
        (lambda version: make_follower(store, version=version)) if into is None else None,
        only=only,
        to_position=to_position,
        compare=compare,
        archive=archive,
        bodies=bodies,
        restart=restart,
        verify=verify,
        allow_gaps=allow_gaps,
        progress=progress,
    )


def verify_projections(
    address: str,
    progress: Callable[[Progress], None] = lambda _: None,
    *,
    archive: str | None = None,
    chain: bool = True,
    runner: Runner | None = None,
) -> VerifyReport:
    """Compare the read models of a store with its log; see `postroom.projections.verify.verify`.

    Arguments:
        address, archive, runner: as for `rebuild_projections`.
        chain: also check the hashes of the log.
    """

    def backlog_at(mailbox: str, position: int) -> list[TopicCount]:
        with read_mailbox(address, mailbox) as reader:
            return reader.get_backlog(at=position).shards

    store = open_store(address)
    return verify(
        open_log_reader(store, archive),
        store.read_model_store(),
        runner or SparkRunner(),
        backlog_at=backlog_at,
        chain=chain,
        progress=progress,
    )


def roll_back_projections(address: str, to: int | None = None) -> int:
    """Make an earlier version of a store's read models active again; see `ReadModelStore.roll_back`."""
    return open_store(address).read_model_store().roll_back(to)
