"""`postroom doctor`: what is wrong with an installation, and what to do."""

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from postroom.adapters.cli.access_settings import AccessSection
from postroom.adapters.cli.exit_codes import DONE, REFUSED
from postroom.adapters.cli.messaging import Outboxes
from postroom.adapters.cli.outbox_capture import capture_settings
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.values import parse_duration

if TYPE_CHECKING:
    from postroom.adapters.compose.doctor import Check, Finding

STATEMENT_SHARE = 0.5
"""Share of the deadline after which a statement or request has failed, so that its check can say so."""


def doctor(
    session: Session,
    within: Annotated[
        str, Option("--within", metavar="DURATION", help="Deadline for all checks, which run concurrently.")
    ] = "10s",
    outbox: Outboxes = None,
) -> int:
    """Check this machine, the store and the servers of the settings, and say what to do.

    Nothing is changed. NATS, the database of a service and the replication slot of its table are checked if
    the settings have [nats], [messaging] and [capture].
    """
    from postroom.adapters.compose.doctor import host_checks, outboxes_check, run_checks, store_checks

    seconds = parse_duration(within) / 1_000
    statement_seconds = seconds * STATEMENT_SHARE
    settings = session.settings
    checks = [
        *_settings_checks(session),
        *store_checks(session.store, settings.durability, statement_seconds),
        *_server_checks(session, statement_seconds),
        *([] if session.is_remote else [outboxes_check(session.outbox_databases(outbox or ()))]),
        *host_checks(),
    ]
    findings = run_checks(checks, seconds)
    has_failed = any(each.status == "failure" for each in findings)
    if session.out.as_json:
        session.out.json({"ok": not has_failed, "checks": findings})
    else:
        _show(session, findings)
    return REFUSED if has_failed else DONE


def _settings_checks(session: Session) -> "Iterator[Check]":
    from postroom.adapters.compose.doctor import Check, Finding

    def run() -> Iterator[Finding]:
        from postroom.adapters.cli.config import all_settings

        count = sum(each.source != "default" for each in all_settings(session))
        file = session.settings.file
        yield Finding("settings", "ok", f"{count} set, {f'file {file}' if file else 'without a file'}")
        if file is not None and stat.S_IMODE(Path(file).stat().st_mode) & stat.S_IRWXO:
            advice = f"If it has passwords or keys, run: chmod o= {file}"
            yield Finding("settings file", "warning", f"every user can read {file}", advice)

    yield Check("settings", run)


def _server_checks(session: Session, seconds: float) -> "Iterator[Check]":
    from postroom.adapters.compose.doctor import (
        Check,
        Finding,
        capture_check,
        database_check,
        keys_check,
        nats_check,
    )
    from postroom.adapters.compose.settings import MessagingSettings, NatsSettings

    def nats() -> Iterator[Finding]:
        yield from nats_check(session.settings.section("nats", NatsSettings), seconds).run()

    def messaging() -> Iterator[Finding]:
        url = session.settings.section("messaging", MessagingSettings).database
        yield from database_check(url, "messaging", "messaging", seconds).run()

    def capture() -> Iterator[Finding]:
        messaging = session.settings.section("messaging", MessagingSettings)
        yield from capture_check(messaging, capture_settings(session), seconds).run()

    def keys() -> Iterator[Finding]:
        yield from keys_check(session.store, session.settings.section("access", AccessSection).key_file).run()

    yield Check("keys", keys)
    if session.settings.sections.get("nats"):
        yield Check("nats", nats)
    if session.settings.sections.get("messaging"):
        yield Check("messaging", messaging)
    if session.settings.sections.get("capture"):
        yield Check("capture", capture)


def _show(session: Session, findings: "list[Finding]") -> None:
    from postroom.adapters.cli.tables import Prose

    session.out.table(
        ("check", "status", "finding", "what to do"),
        [(each.check, each.status, Prose(each.finding), Prose(each.advice)) for each in findings],
    )
