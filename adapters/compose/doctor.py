"""Wiring of `postroom doctor`: the checks of a machine, a store and the servers that it needs."""

from collections.abc import Iterator, Sequence
from contextlib import closing

from postroom.adapters.compose.access import open_key_ring
from postroom.adapters.compose.schedule import OutboxDatabases
from postroom.adapters.compose.store import JETSTREAM_SCHEME, MEMORY, is_on_servers, open_store, scheme_of
from postroom.adapters.local.endpoints import fits
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.capture.settings import CaptureSettings
from postroom.adapters.postgres.messaging.settings import MessagingSettings
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.store import store_checks as sqlite_checks
from postroom.adapters.system.clock import SystemClock
from postroom.adapters.system.host import host_checks
from postroom.application.access.authority import signing_key
from postroom.application.diagnosis import MAX_SKEW_MS, Check, Finding, run_checks
from postroom.application.extras import explain_missing_extra
from postroom.application.text import pluralize
from postroom.domain.capability.token import RootKey
from postroom.domain.mailbox.ownership import MAX_DOWNTIME
from postroom.domain.message import MS
from postroom.domain.policy import DAY_MS

MAX_KEY_DAYS = 90
"""Age from which on a key should be replaced."""

__all__ = [
    "Check",
    "Finding",
    "capture_check",
    "check_keys",
    "database_check",
    "host_checks",
    "keys_check",
    "nats_check",
    "outboxes_check",
    "run_checks",
    "store_checks",
]


def store_checks(address: str, durability: Durability, seconds: float) -> list[Check]:
    """Return the checks of a store.

    Arguments:
        address: a file, `postgresql://...`, `nats://...` or `memory:`.
        seconds: deadline of a statement.
    """
    if address == MEMORY:
        return []
    if is_url(address):
        own = [database_check(address, "store", "database", seconds)]
    elif scheme_of(address) == JETSTREAM_SCHEME:
        own = [_streams_check(address)]
    else:
        own = sqlite_checks(address, durability, fits)
    owners = [_owners_check(address, seconds)] if is_url(address) else []
    return [*own, *owners, Check("logs", lambda: _check_logs(address))]


def _streams_check(address: str) -> Check:
    """Return the check of the streams of a store in JetStream."""

    def run() -> Iterator[Finding]:
        with explain_missing_extra("nats"):
            from postroom.adapters.jetstream.store import check_streams
        yield from check_streams(address)

    return Check("streams", run)


def _owners_check(url: str, seconds: float) -> Check:
    """Return the check of the addresses at which owners answer other hosts."""

    def run() -> Iterator[Finding]:
        with explain_missing_extra("postgres"):
            from postroom.adapters.postgres.store import find_owners
        yield from find_owners(url, seconds)

    return Check("owners", run)


def database_check(url: str, set_: str, name: str, seconds: float) -> Check:
    """Return the check of a PostgreSQL database.

    Arguments:
        set_: its migrations, `store` or `messaging`.
        name: first word of its findings' names.
        seconds: deadline of a statement.
    """

    def run() -> Iterator[Finding]:
        with explain_missing_extra("postgres"):
            from postroom.adapters.postgres.store import check_database
        yield from check_database(url, set_, name, seconds)

    return Check(name, run)


def capture_check(messaging: MessagingSettings, settings: CaptureSettings, seconds: float) -> Check:
    """Return the check of the replication slot of a capture; `seconds` is the deadline of a statement."""

    def run() -> Iterator[Finding]:
        with explain_missing_extra("postgres"):
            from postroom.adapters.postgres.capture.slot import check_slot
        yield check_slot(settings.database or messaging.database, settings, seconds)

    return Check("capture", run)


def nats_check(settings: NatsSettings, seconds: float) -> Check:
    """Return the check of a NATS server; `seconds` is the deadline of a request."""

    def run() -> Iterator[Finding]:
        with explain_missing_extra("nats"):
            from postroom.adapters.nats.connection import check_nats
        yield from check_nats(settings, seconds)

    return Check("nats", run)


def keys_check(store: str, path: str | None) -> Check:
    """Return the check of the keys that sign capabilities.

    Arguments:
        path: of the key file; None is beside the store.
    """

    def run() -> Iterator[Finding]:
        if path is None and (is_on_servers(store) or store == MEMORY):
            advice = "Name one with [access] key_file, outside the store."
            yield Finding("keys", "ok", "there is no key file; only serve --dev starts", advice)
            return
        yield check_keys(open_key_ring(store, path).root_keys(), SystemClock().wall())

    return Check("keys", run)


def outboxes_check(databases: OutboxDatabases) -> Check:
    """Return the check for messages that transactions recorded and no owner sends."""

    def run() -> Iterator[Finding]:
        is_fine = True
        for each in databases.count_messages():
            if not each.problem:
                continue
            is_fine = False
            where = f"{each.count_text} for {each.mailbox} in {each.database}: " if each.mailbox else ""
            yield Finding("outboxes", "warning", f"{where}{each.problem}", each.advice)
        if is_fine:
            yield Finding("outboxes", "ok", "no recorded message waits for longer than a minute")

    return Check("outboxes", run)


def check_keys(keys: Sequence[RootKey], now: int) -> Finding:
    """Return the age of the keys that sign capabilities; `now` is µs since 1970 UTC."""
    newest = signing_key(keys)
    if newest is None:
        return Finding("keys", "ok", "none yet", "Make one with postroom token rotate; serve needs it.")
    days = max(0, now - newest.created_at) // (DAY_MS * MS)
    retired = sum(each.retire_at is not None and each.retire_at <= now for each in keys)
    text = f"{len(keys)}, of which {retired} retired; the newest is {days} days old"
    if newest.retire_at is not None and newest.retire_at <= now:
        return Finding("keys", "failure", f"all {len(keys)} are retired", "Run: postroom token rotate")
    if days >= MAX_KEY_DAYS:
        return Finding("keys", "warning", text, "Run: postroom token rotate")
    return Finding("keys", "ok", text)


def _check_logs(address: str) -> Iterator[Finding]:
    """Find logs whose newest record is later than the clock of this machine."""
    store, is_fine = open_store(address), True
    mailboxes = store.mailboxes()
    for mailbox in mailboxes:
        with closing(store.existing_log(mailbox)) as log:
            head = log.head()
        ahead = 0 if head is None else head.at - SystemClock().wall()
        if ahead > MAX_SKEW_MS * 1_000:
            is_fine = False
            yield Finding(
                "logs",
                "failure" if ahead > MAX_DOWNTIME else "warning",
                f"the last record of {mailbox} is {ahead // 1_000_000:,} s ahead of this clock",
                "Set the clock: until it has caught up, log time stands still after a restart.",
            )
    if is_fine:
        count = f"{pluralize(len(mailboxes), 'mailbox', 'mailboxes')}, none ahead of this clock"
        yield Finding("logs", "ok", count if mailboxes else "no mailbox yet")
