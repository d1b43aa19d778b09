"""`postroom config`: the settings in force, and where each comes from."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from typer import Argument

from postroom.adapters.cli.access_settings import AccessSection
from postroom.adapters.cli.admin import AdminSettings
from postroom.adapters.cli.cluster_settings import ClusterSettings
from postroom.adapters.cli.project import SearchSettings
from postroom.adapters.cli.proxy import ProxySettings
from postroom.adapters.cli.runner import RunnerSection
from postroom.adapters.cli.serve import ServeSettings
from postroom.adapters.cli.session import ArchiveSettings, OwnerSection, RelaySettings, Session
from postroom.adapters.cli.settings import Settings
from postroom.adapters.cli.tables import Prose
from postroom.adapters.cli.values import WrongUsage, exact_duration
from postroom.adapters.compose.audit import AuditSettings
from postroom.adapters.compose.console import ConsoleSettings
from postroom.adapters.compose.settings import (
    KafkaSettings,
    MessagingSettings,
    NatsSettings,
    RabbitmqSettings,
)
from postroom.adapters.compose.tracing import TracingSettings
from postroom.application.erasure.settings import ErasureSettings
from postroom.application.inbox.settings import InboxSettings
from postroom.application.outbox.settings import OutboxSettings
from postroom.domain.names import describe_choices
from postroom.domain.policy import MailboxLimits, TopicPolicy

DEFAULT = "default"
HIDDEN = "(hidden)"
_KINDS: Mapping[str, type[msgspec.Struct]] = {
    "archive": ArchiveSettings,
    "serve": ServeSettings,
    "console": ConsoleSettings,
    "access": AccessSection,
    "audit": AuditSettings,
    "nats": NatsSettings,
    "kafka": KafkaSettings,
    "rabbitmq": RabbitmqSettings,
    "search": SearchSettings,
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
# The user of a URL may be a token, and a password may have any character or be an option: rather too much is
# hidden than too little.
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
    if session.out.as_json:
        session.out.json({"file": session.settings.file, "settings": [each._asdict() for each in settings]})
        return
    session.out.table(
        ("setting", "value", "source"),
        [
            (
                Prose(each.name.removesuffix("_ms")),
                _shown(each.name, each.value),
                Prose(each.source),
            )
            for each in settings
        ],
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
    for section, kind in _KINDS.items():
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
