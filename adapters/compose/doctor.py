"""Wiring of `postroom doctor`: the checks of a machine, a store and the servers that it needs."""

from collections.abc import Iterator
from contextlib import closing

from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.local.paths import MAX_PATH_BYTES
from postroom.adapters.nats.settings import NatsSettings
from postroom.adapters.postgres.url import is_url
from postroom.adapters.sqlite.database import Durability
from postroom.adapters.sqlite.diagnosis import store_checks as sqlite_checks
from postroom.adapters.system.clock import SystemClock
from postroom.adapters.system.diagnosis import host_checks
from postroom.application.diagnosis import MAX_SKEW_MS, Check, Finding, run_checks
from postroom.application.extras import explain_missing_extra
from postroom.domain.mailbox.log_clock import MAX_DOWNTIME

__all__ = ["Check", "Finding", "database_check", "host_checks", "nats_check", "run_checks", "store_checks"]


def store_checks(address: str, durability: Durability, seconds: float) -> list[Check]:
    """Return the checks of a store.

    Arguments:
        address: a file, `postgresql://...` or `memory:`.
        seconds: deadline of a statement.
    """
    if address == MEMORY:
        return []
    own = (
        [database_check(address, "store", "database", seconds)]
        if is_url(address)
        else sqlite_checks(address, durability, MAX_PATH_BYTES)
    )
    return [*own, Check("logs", lambda: _check_logs(address))]


def database_check(url: str, set_: str, name: str, seconds: float) -> Check:
    """Return the check of a PostgreSQL database.

    Arguments:
        set_: its migrations, `store` or `messaging`.
        name: first word of its findings' names.
        seconds: deadline of a statement.
    """

    def run() -> Iterator[Finding]:
        with explain_missing_extra("postgres"):
            from postroom.adapters.postgres.diagnosis import check_database
        yield from check_database(url, set_, name, seconds)

    return Check(name, run)


def nats_check(settings: NatsSettings, seconds: float) -> Check:
    """Return the check of a NATS server; `seconds` is the deadline of a request."""

    def run() -> Iterator[Finding]:
        with explain_missing_extra("nats"):
            from postroom.adapters.nats.diagnosis import check_nats
        yield from check_nats(settings, seconds)

    return Check("nats", run)


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
        yield Finding("logs", "ok", f"{len(mailboxes):,} of mailboxes, none ahead of this clock")
