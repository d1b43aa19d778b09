"""`postroom config`, `doctor` and `explain`: settings in force, faults of an installation, error codes."""

import os
import re
import shlex
import stat
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.admin import AdminSettings, ClusterSettings
from postroom.adapters.cli.cluster import ProxySettings, RunnerSection
from postroom.adapters.cli.outbox import capture_settings
from postroom.adapters.cli.output import Id, Prose
from postroom.adapters.cli.restrictions import AccessSection
from postroom.adapters.cli.serve import ServeSettings
from postroom.adapters.cli.session import ArchiveSettings, OwnerSection, RelaySettings, Session
from postroom.adapters.cli.settings import Settings
from postroom.adapters.cli.values import DONE, REFUSED, Outboxes, WrongUsage, exact_duration, parse_duration
from postroom.adapters.cli.views import SearchSettings
from postroom.adapters.compose.access import AuditSettings
from postroom.adapters.compose.brokers import KafkaSettings, MessagingSettings, NatsSettings, RabbitmqSettings
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.mcp import McpSettings
from postroom.adapters.compose.process import TracingSettings
from postroom.application.erasure.erase_subject import ErasureSettings
from postroom.application.inbox.metrics import InboxSettings
from postroom.application.outbox.relay import OutboxSettings
from postroom.domain.names import describe_choices
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.projections.engine import EngineSettings

if TYPE_CHECKING:
    from postroom.adapters.compose.doctor import Check, Finding


DEFAULT = "default"
HIDDEN = "(hidden)"
STRUCTS: Mapping[str, type[msgspec.Struct]] = {
    "archive": ArchiveSettings,
    "serve": ServeSettings,
    "console": ConsoleSettings,
    "mcp": McpSettings,
    "access": AccessSection,
    "audit": AuditSettings,
    "nats": NatsSettings,
    "kafka": KafkaSettings,
    "rabbitmq": RabbitmqSettings,
    "search": SearchSettings,
    "engine": EngineSettings,
    "messaging": MessagingSettings,
    "outbox": OutboxSettings,
    "inbox": InboxSettings,
    "owner": OwnerSection,
    "erasure": ErasureSettings,
    "relay": RelaySettings,
    "tracing": TracingSettings,
    "cluster": ClusterSettings,
    "proxy": ProxySettings,
    "runner": RunnerSection,
    "admin": AdminSettings,
}
_FREE = ("schedules", "streams", "consumers")
"""Sections whose keys are names that the user chose; only these are shown."""
_SECRETS = ("node_token", "signing_key", "previous_signing_key")
# A URL's user may be a token, and its password may contain any character or be an option, so this hides too
# much rather than too little.
_CREDENTIALS = re.compile(r"(?<=://)\S*@")
_PASSWORD = re.compile(r"(?i)\b(password|passwd|token|secret)=[^&\s,]+")


class Setting(NamedTuple):
    """A setting in force, without secrets, and its source."""

    name: str
    value: Any
    source: str


def show(
    session: Session,
    section: Annotated[
        str | None, Argument(help="Only this section, such as policy, serve or inbox.")
    ] = None,
) -> None:
    """Show the settings in force, and where each comes from; passwords and keys are hidden."""
    settings = list(all_settings(session))
    if section is not None:
        names = {each.name.partition(".")[0] for each in settings}
        if section not in names:
            raise WrongUsage(f"There is no section {section}; {describe_choices(section, names)}")
        settings = [each for each in settings if each.name.partition(".")[0] == section]
    session.out.records(
        {"file": session.settings.file, "settings": [each._asdict() for each in settings]},
        ("setting", "value", "source"),
        settings,
        lambda each: (
            Prose(each.name.removesuffix("_ms")),
            _shown(each.name, each.value),
            Prose(each.source),
        ),
    )


def all_settings(session: Session) -> Iterator[Setting]:
    """Yield the settings in force.

    Raises: InvalidSettings naming a section's setting that is invalid.
    """
    settings = session.settings
    values = {
        "store": session.store,
        "mailbox": session.mailbox,
        "durability": settings.durability,
        "log_level": settings.log_level,
        "log_format": settings.log_format,
        "timeout_ms": settings.timeout_ms,
    }
    for name, value in values.items():
        yield _setting(settings, name, value)
    yield from _fields(settings, "policy", settings.policy, TopicPolicy)
    for topic, fields in settings.topics.items():
        for name, value in fields.items():
            yield _setting(settings, f"topics.{topic}.{name}", value)
    yield from _fields(settings, "limits", settings.limits, MailboxLimits)
    for section, kind in STRUCTS.items():
        needs_more = any(each.required for each in msgspec.structs.fields(kind))
        if settings.sections.get(section) or not needs_more:
            yield from _fields(settings, section, settings.section(section, kind), kind)
    for section in _FREE:
        for name in settings.sections.get(section, {}):
            yield Setting(f"{section}.{name}", "...", settings.sources[f"{section}.{name}"])


def _fields(
    settings: Settings, section: str, values: msgspec.Struct, kind: type[msgspec.Struct]
) -> Iterator[Setting]:
    for name in kind.__struct_fields__:
        yield _setting(settings, f"{section}.{name}", getattr(values, name))


def _setting(settings: Settings, name: str, value: Any) -> Setting:
    """Return a setting without its secrets; a duration `x_ms` may have been set as `x`."""
    source = settings.sources.get(name) or settings.sources.get(name.removesuffix("_ms"), DEFAULT)
    return Setting(name, _masked(name, msgspec.to_builtins(value)), source)


def _masked(name: str, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_masked(name, each) for each in value]
    if isinstance(value, dict):
        return {key: _masked(name, each) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    if name.rpartition(".")[2] in _SECRETS:
        return HIDDEN if value else value
    return _PASSWORD.sub(rf"\1={HIDDEN}", _CREDENTIALS.sub(f"{HIDDEN}@", value))


def _shown(name: str, value: Any) -> Any:
    if name.endswith("_ms"):
        return exact_duration(value)
    if isinstance(value, list):
        return Prose(", ".join(map(str, value)))
    if isinstance(value, dict):
        return Prose(", ".join(f"{key}={each}" for key, each in value.items()))
    return value if value is None or isinstance(value, bool) else Prose(value)


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


def explain(
    session: Session,
    code: Annotated[
        str | None, Argument(help="Code of an error, such as E_STORE; none lists all codes.")
    ] = None,
) -> None:
    """Explain an error code: its cause, an example, and what to do.

    Errors have their code in JSON (--json), in problem documents of HTTP and in the details of gRPC.
    """
    from postroom.application.error_reference import error_entries, find_error_entry

    if code is None:
        entries = error_entries()
        session.out.records(
            {name: entry.title for name, entry in entries.items()},
            ("code", "meaning"),
            entries.items(),
            lambda each: (Id(each[0]), Prose(each[1].title)),
        )
        return
    name, entry = find_error_entry(code)
    if session.out.as_json:
        session.out.json({"code": name, **msgspec.to_builtins(entry)})
        return
    session.out.prose(f"{name}: {entry.title}")
    for label, text in (("Cause", entry.cause), ("Example", entry.example), ("Remedy", entry.remedy)):
        session.out.line()
        session.out.prose(text, f"{label}: ")


def _settings_checks(session: Session) -> "Iterator[Check]":
    from postroom.adapters.compose.doctor import Check, Finding

    def run() -> Iterator[Finding]:

        count = sum(each.source != "default" for each in all_settings(session))
        file = session.settings.file
        yield Finding("settings", "ok", f"{count} set, {f'file {file}' if file else 'without a file'}")
        if file is not None and stat.S_IMODE(Path(file).stat().st_mode) & stat.S_IRWXO:
            advice = f"If it has passwords or keys, run: chmod o= {file}"
            yield Finding("settings file", "warning", f"every user can read {file}", advice)

    yield Check("settings", run)


def _server_checks(session: Session, seconds: float) -> "Iterator[Check]":
    from postroom.adapters.compose.brokers import MessagingSettings, NatsSettings
    from postroom.adapters.compose.doctor import (
        Check,
        Finding,
        capture_check,
        database_check,
        keys_check,
        nats_check,
    )

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
    session.out.table(
        ("check", "status", "finding", "what to do"),
        [(each.check, each.status, Prose(each.finding), Prose(each.advice)) for each in findings],
    )


FILES = {
    "postroom.toml": """\
# Settings; `postroom doctor` checks them.
[topics."orders"]
max_attempts = 5
""",
    "app.py": '''\
"""Handlers of messages; `postroom up app:worker` runs them."""

from postroom import Worker

worker = Worker()


@worker.consumer("orders")
async def place(order: dict[str, object]) -> None:
    """Handle one order; the message is delivered again if this raises."""
    print(f"placed {order}")
''',
    "test_app.py": '''\
"""Tests of the handlers; `pytest` runs them."""

import asyncio

from app import worker
from postroom import NewMessage, open_mailbox


async def handle_an_order() -> tuple[int, int]:
    async with open_mailbox("memory:") as mailbox:
        await mailbox.send_message(NewMessage("orders", b'{"id": 1}'))
        counts = await worker.run(mailbox, once=True)
    return counts.handled, counts.failed


def test_an_order_is_handled() -> None:
    assert asyncio.run(handle_an_order()) == (1, 0)
''',
}
"""The files of a new project."""


def init(
    session: Session,
    folder: Annotated[
        Path, Argument(metavar="[FOLDER]", help="Folder of the project; created if missing.")
    ] = Path(),
) -> None:
    """Write the files of a new project: settings, a worker and its test; no file is overwritten."""
    existing = [name for name in FILES if os.path.lexists(folder / name)]
    if existing:
        raise WrongUsage(f"{', '.join(existing)} exist in {folder.absolute()}; name another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        mode = 0o600 if name.endswith(".toml") else 0o666  # settings may get secrets
        with open(folder / name, "x", encoding="utf-8", opener=partial(os.open, mode=mode)) as file:
            file.write(text)
    session.out.result({"folder": str(folder), "files": [*FILES]}, f"Wrote {', '.join(FILES)}.")
    enter = "" if folder == Path() else f"cd {shlex.quote(str(folder))} && "
    session.out.note(
        f"Start it with `{enter}postroom up app:worker --reload`. In the same folder of another terminal:"
    )
    session.out.note("""postroom send orders '{"id": 1}'""")
