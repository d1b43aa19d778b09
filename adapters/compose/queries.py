"""Readers of a store's log and read models, including read models that were built for another tool."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from postroom.adapters.compose import list_mailboxes
from postroom.adapters.compose.archive import has_archive, open_archive
from postroom.adapters.compose.store import open_protection, open_store
from postroom.adapters.system.clock import SystemClock
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.erasure.protection import MessageEncryption
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.archived_log import ArchivedEventLog
from postroom.application.mailbox.stored_snapshots import fold
from postroom.application.ports.event_log import Clock, EventLogReader
from postroom.application.ports.read_models import ReadModels
from postroom.application.queries.browse_log import FindMessageIds
from postroom.application.queries.describe_topic import DescribeTopic
from postroom.application.queries.explain_message import ExplainMessage
from postroom.application.queries.get_message import GetMessage
from postroom.application.queries.mailbox_past import LogTime, StateAt, read_settings
from postroom.application.queries.measure_mailbox import (
    DescribeMailbox,
    GetBacklog,
    ListSubscriptions,
    ListTopics,
    MailboxSummary,
)
from postroom.application.queries.message_lists import (
    GetProjectionStatus,
    GetTableStats,
    GroupDeadLetters,
    ListDeadLetters,
    PeekMessages,
    SearchMessages,
    WhyEmpty,
)
from postroom.application.queries.preview_settings import PreviewSettings
from postroom.application.queries.simulate_policy import SimulatePolicy
from postroom.application.queries.verify import VerifyLog
from postroom.application.reports import ScheduleReport, SearchReport, report_searches
from postroom.application.schedules import report_schedules
from postroom.domain.arguments import check_path
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.names import DEFAULT_MAILBOX, check_mailbox, check_topic
from postroom.domain.policy import TopicPolicy
from postroom.domain.search import EventFilter
from postroom.domain.settings import MailboxSettings, SettingsChanges, resolve_policy
from postroom.domain.subject import SubjectPolicy

if TYPE_CHECKING:  # slow to import
    from postroom.adapters.clickhouse.database import ClickHouseDatabase
    from postroom.adapters.read_model_targets import Target
    from postroom.projections.ports.read_model_store import ReadModelStore


class Reader:
    """The queries on one mailbox, for a process that does not own it; any number of readers is allowed."""

    def __init__(
        self, log: EventLogReader, clock: Clock, protection: MessageEncryption | None = None
    ) -> None:
        self.log = log
        now = LogTime(log, clock)
        self.get_message = GetMessage(log, now, protection)
        self.find_message_ids = FindMessageIds(log)
        self.explain_message = ExplainMessage(log, now)
        state_at = StateAt(log, now)
        self.get_backlog = GetBacklog(state_at)
        self._preview_settings = PreviewSettings(log, now, lambda: fold(log))
        self.list_dead_letters = ListDeadLetters(state_at, log)
        self.list_topics = ListTopics(state_at)
        describe = DescribeTopic(log, state_at, now)
        self.describe_topic, self.list_consumers = describe, describe.list_consumers
        self.list_subscriptions = ListSubscriptions(state_at, log)
        self._state_at = state_at
        self.peek_messages = PeekMessages(state_at, log, protection)
        self.why_empty = WhyEmpty(state_at)
        self.verify_log = VerifyLog(log)
        self.simulate_policy = SimulatePolicy(log)

    def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox; see `Settings.get_settings`."""
        return read_settings(self.log)

    def list_schedules(self) -> list[ScheduleReport]:
        """Return the schedules as they are now; see `Mailbox.list_schedules`."""
        return report_schedules(self._state_at(None)[0])

    def list_searches(self) -> list[SearchReport]:
        """Return the saved searches as they are now; see `Mailbox.list_searches`."""
        return report_searches(self._state_at(None)[0].settings.saved_searches)

    def get_topic_policy(self, topic: str) -> TopicPolicy:
        """Return the policy of a topic; see `Mailbox.get_topic_policy`."""
        return resolve_policy(self.get_settings(), check_topic(topic))

    def preview_settings(self, changes: SettingsChanges, *, replace: bool = False) -> SettingsPreview:
        """Return the effects of a change of settings; see `Settings.preview_settings`."""
        return self._preview_settings.count_removed(*self._preview_settings(changes, replace=replace))


class Projections:
    """The queries on the read models of a store, which show the log as of the last rebuild or update."""

    def __init__(self, read_models: ReadModels, protection: MessageEncryption | None = None) -> None:
        self.search_messages = SearchMessages(read_models, protection)
        self.group_dead_letters = GroupDeadLetters(read_models)
        self.get_table_stats = GetTableStats(read_models)
        self.get_projection_status = GetProjectionStatus(read_models)


@contextmanager
def read_mailbox(
    store: str,
    mailbox: str = DEFAULT_MAILBOX,
    *,
    archive: str | Path | None = None,
    erasure: ErasureSettings | None = None,
) -> Iterator[Reader]:
    """Query a mailbox without owning it.

    Arguments:
        archive: folder or URL of the archive, which is read as the log's beginning.
        erasure: decrypts messages; without it, encrypted ones are returned as they are stored.

    Raises: NotFound when the store or the mailbox does not exist; Unavailable when it can't be read, or the
        archive belongs to another store; BrokenLog when records are missing between archive and store.
    """
    protection = None if erasure is None else open_protection(erasure)
    log = open_store(store).existing_log(check_mailbox(mailbox))
    try:
        # Look for the archive first, as PyArrow takes long to load.
        if archive is not None and has_archive(archive, mailbox):
            yield Reader(ArchivedEventLog(log, open_archive(archive)), SystemClock(), protection)
        else:
            yield Reader(log, SystemClock(), protection)
    finally:
        log.close()


@contextmanager
def read_projections(
    store: str, source: str | None = None, *, erasure: ErasureSettings | None = None
) -> Iterator[Projections]:
    """Query the read models of a store.

    Arguments:
        source: target into which they were built; see `open_read_models`.
        erasure: finds encrypted messages by their subjects.

    Raises: Unavailable when they can't be read; the queries raise NotFound before the first rebuild.
    """
    read_models = open_read_models(store, source)
    try:
        protection = None if erasure is None else open_protection(erasure)
        if protection is not None:
            protection.read_topics = cache(lambda: _subject_policies(store))
        yield Projections(read_models, protection)
    finally:
        read_models.close()


@explain_missing_extra("console")
def parse_saved_search(query: str) -> EventFilter:
    """Return the filter of a saved search; raise InvalidRequest for a malformed one, or MissingExtra."""
    from postroom.adapters.console.event_filter import parse_filter

    return parse_filter(parse_qsl(query))


def _subject_policies(store: str) -> dict[str, SubjectPolicy]:
    """Return the policies that say for which subjects messages are encrypted, by mailbox and topic."""
    policies: dict[str, SubjectPolicy] = {}
    for name in list_mailboxes(store):
        with read_mailbox(store, name) as reader:
            topics = reader.get_settings().subject_policies
            policies |= {f"{name} {topic}": policy for topic, policy in topics.items()}
    return policies


def open_read_models(store: str, source: str | None = None) -> ReadModels:
    """Return the read models of a store: a SQLite file or a PostgreSQL database.

    Arguments:
        source: `clickhouse:` or `chdb:` address into which they were built; None for the store's own.

    Raises: InvalidRequest for any other address.
    """
    with explain_missing_extra("clickhouse" if source else None):
        place = open_store(store)
        if source is None:
            return place.read_models(open_archive)

        database = open_clickhouse(source, "can't be queried")
        from postroom.adapters.clickhouse.read_models import ClickHouseReadModels

        return ClickHouseReadModels(database, place.queried_log(open_archive))


async def describe_mailboxes(store: str) -> list[MailboxSummary]:
    """Return the mailboxes of a store with their modes, owners and sizes, sorted by name.

    Raises: Unavailable when the store can't be read.
    """
    place = open_store(store)
    summaries = []
    for name in list_mailboxes(store):
        with closing(place.existing_log(name)) as log:
            summaries.append(await DescribeMailbox(log, place.ownership())())
    return summaries


_EXTRAS = {
    "parquet": "views",
    "chdb": "clickhouse",
    "clickhouse": "clickhouse",
    "clickhouses": "clickhouse",
}
"""The extra that each kind of target needs."""


def open_target(into: str) -> "ReadModelStore":
    """Return the read model store in a target for other tools.

    Arguments:
        into: `parquet:FOLDER`, `chdb:FOLDER`, or `clickhouse://user:password@host:port/database`, with
            `clickhouses` for TLS.

    Raises: InvalidRequest for any other address. MissingExtra when a library is not installed.
    """
    kind, _, place = check_path("into", into).partition(":")
    if kind not in _EXTRAS or not place.strip("/"):
        raise InvalidRequest(
            f"Read models can't be built into {kind}:...; name parquet:FOLDER, chdb:FOLDER or "
            "clickhouse://user@host:8123/database."
        )
    with explain_missing_extra(_EXTRAS[kind]):
        from postroom.adapters.read_model_targets import TargetReadModelStore

        return TargetReadModelStore(_target(kind, place, into))


def open_clickhouse(address: str, refusal: str) -> "ClickHouseDatabase":
    """Return the database of ClickHouse at an address.

    Arguments:
        address: `chdb:FOLDER` or `clickhouse://user:password@host:port/database`; see `open_target`.
        refusal: predicate of the error for any other address, such as `can't be queried`.

    Raises: InvalidRequest for any other address. MissingExtra when a library is not installed.
    """
    kind, _, place = check_path("address", address).partition(":")
    if _EXTRAS.get(kind) != "clickhouse" or not place.strip("/"):
        raise InvalidRequest(
            f"Read models in {kind}:... {refusal}; name clickhouse://user@host:8123/database or chdb:FOLDER."
        )
    with explain_missing_extra("clickhouse"):
        from postroom.adapters.clickhouse.database import open_database
    return open_database(address)


def _target(kind: str, place: str, into: str) -> "Target":
    if kind == "parquet":
        from postroom.adapters.parquet.read_model_target import ParquetTarget

        return ParquetTarget(place)
    from postroom.adapters.clickhouse.database import open_database
    from postroom.adapters.clickhouse.read_model_target import ClickHouseTarget

    return ClickHouseTarget(open_database(into))
