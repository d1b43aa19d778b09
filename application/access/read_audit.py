"""`ReadAudit`: the entries of the audit log, newest first; `VerifyAudit`: whether any was altered."""

from collections.abc import Iterator, Sequence

import msgspec

from postroom.application.access.audit import AuditEntry
from postroom.application.access.audit_records import REMOVALS, EntriesRemoved, to_entry, to_removal
from postroom.application.ports.event_log import EventLogReader
from postroom.application.queries.verify import VerifyLog
from postroom.domain.arguments import MAX_PAGE, check_int
from postroom.domain.search import topic_matches

RECORDS_PER_READ = 1_000


class AuditFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Criteria that an entry must all meet; an empty filter matches every entry.

    Arguments:
        since, until: µs since 1970 UTC; the former is included, the latter is not.
        topic: a topic or glob; entries that name no topic concern all of them and match.
        target: message id, or name of a mailbox.
    """

    since: int | None = None
    until: int | None = None
    principal: str | None = None
    capability: str | None = None
    operation: str | None = None
    outcome: str | None = None
    topic: str | None = None
    target: str | None = None

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether an entry matches, regardless of its time."""
        return (
            self.principal in (None, entry.principal)
            and self.capability in (None, entry.capability)
            and self.operation in (None, entry.operation)
            and self.outcome in (None, entry.outcome)
            and self.target in (None, entry.target)
            and self._matches_topic(entry.topics)
        )

    def _matches_topic(self, topics: Sequence[str]) -> bool:
        # A search names topics by globs, too: either may cover the other.
        topic = self.topic
        return (
            topic is None
            or not topics
            or any(topic_matches(topic, each) or topic_matches(each, topic) for each in topics)
        )


class AuditPage(msgspec.Struct, frozen=True):
    """Page of audit entries; `next_cursor` is None on the last page.

    A page that ended because of `reads` may have fewer entries than its limit, and a cursor all the same.
    """

    entries: tuple[AuditEntry, ...]
    next_cursor: int | None = None


class ReadAudit:
    """A query of the audit log."""

    def __init__(self, log: EventLogReader) -> None:
        self._log = log

    def __call__(
        self,
        filter_: AuditFilter | None = None,
        *,
        limit: int = 100,
        cursor: int | None = None,
        reads: int | None = None,
    ) -> AuditPage:
        """Return entries, newest first.

        Arguments:
            limit: maximum number of entries, 1 to 1,000.
            cursor: `next_cursor` of the previous page.
            reads: maximum number of entries that are compared with the filter; None is no limit.

        Raises: InvalidRequest for a limit out of bounds, Unavailable when the log can't be read, BrokenLog
            for a record that was altered so that it can't be read.
        """
        check_int("limit", limit, 1, MAX_PAGE)
        criteria = filter_ or AuditFilter()
        entries: list[AuditEntry] = []
        for count, (position, entry) in enumerate(self._backwards(criteria, cursor)):
            if count == reads:
                return AuditPage(tuple(entries), position + 1)
            if not criteria.matches(entry):
                continue
            if len(entries) == limit:
                return AuditPage(tuple(entries), position + 1)
            entries.append(entry)
        return AuditPage(tuple(entries))

    def _backwards(self, criteria: AuditFilter, cursor: int | None) -> Iterator[tuple[int, AuditEntry]]:
        """Yield the entries of the filter's time before position `cursor`, newest first."""
        first, head = self._log.first_position(), self._log.head()
        if first is None or head is None:
            return
        last = head.position if criteria.until is None else self._log.position_before(criteria.until)
        if cursor is not None:
            last = min(last, cursor - 1)
        if criteria.since is not None:
            first = max(first, self._log.position_before(criteria.since) + 1)
        while last >= first:
            after = max(first - 1, last - RECORDS_PER_READ)
            for record in reversed(list(self._log.read(after, last - after))):
                entry = to_entry(record) if record.position <= last else None
                if entry is not None:
                    yield record.position, entry
            last = after


def removals(log: EventLogReader) -> list[EntriesRemoved]:
    """Return the removals by retention that the audit log records."""
    return [to_removal(record) for record in log.read_stream(REMOVALS)]


def verify_audit(log: EventLogReader) -> VerifyLog:
    """Return the verification of the audit log's hash chain."""
    return VerifyLog(log, removals)
