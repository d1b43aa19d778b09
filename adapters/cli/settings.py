"""Settings: flags over environment (`POSTROOM_*`) over `postroom.toml` over defaults, all checked at start.

They are checked against the structs that policies are made of: nothing is declared twice, and a command
starts a fifth of a second sooner than with a settings framework.
"""

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from postroom.adapters.cli.values import WrongUsage, parse_duration
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_mailbox, check_topic
from postroom.domain.policy import MailboxLimits, TopicPolicy

FILE = "postroom.toml"
PREFIX = "POSTROOM_"

Struct = TypeVar("Struct", bound=msgspec.Struct)


class InvalidSettings(WrongUsage):
    """A setting can't be what it is; the message names it and where it came from."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Say which store and mailbox to use, and how.

    Arguments:
        store: path of a SQLite file, `postgresql://...`, or `memory:`. None lets each command choose.
        mailbox: `namespace@proxy`. None lets each command choose.
        owner_wait_ms: how long to wait for another process to give the mailbox up.
        policy: what topics promise unless told otherwise.
        topics: what single topics promise; missing fields are those of `policy`.
        file: the settings file that was read, if any.
    """

    store: str | None = None
    mailbox: str | None = None
    durability: Literal["full", "relaxed"] = "full"
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    owner_wait_ms: int = 2_000
    policy: TopicPolicy = TopicPolicy()
    topics: dict[str, TopicPolicy] = {}
    limits: MailboxLimits = MailboxLimits()
    file: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = {}

    def section(self, name: str, kind: type[Struct], flags: Mapping[str, object] | None = None) -> Struct:
        """Return the settings of one command group, such as `[nats]` or `POSTROOM_NATS__URL`.

        Arguments:
            name: one of `SECTIONS`.
            kind: its fields; a duration `x_ms` may leave the `_ms` out and be written like `30s`.
            flags: what the command line says, by field; None where it says nothing.

        Raises: InvalidSettings for an unknown key, a missing one, or a value of the wrong type.
        """
        where = f"[{name}] in {self.file or FILE}, or {PREFIX}{name.upper()}__"
        fields = kind.__struct_fields__
        values: dict[str, object] = {}
        for key, value in self.sections.get(name, {}).items():
            field = f"{key}_ms" if f"{key}_ms" in fields else key
            if field not in fields:
                raise InvalidSettings(f"{where}: there is no key {key!r}{unknown_key(key, fields)}.")
            values[field] = _number(field, value, f"{where}: {key}") if field.endswith("_ms") else value
        values |= {key: value for key, value in (flags or {}).items() if value is not None}
        try:
            return msgspec.convert(values, kind, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidSettings(f"{where}: {error}.") from None


_SCALARS = ("store", "mailbox", "durability", "log_level", "owner_wait_ms")
_TABLES = ("policy", "topics", "limits")
_DATABASES = ("postgresql://", "postgres://")
SECTIONS = ("nats", "messaging", "outbox", "inbox", "streams", "consumers", "archive", "search")
"""Tables of the settings file that are read by the commands that need them."""


def load_settings(
    flags: Mapping[str, str | None], environment: Mapping[str, str], config: str | None = None
) -> Settings:
    """Return the settings in force.

    Arguments:
        flags: what the command line says, by field; None where it says nothing.
        config: path of the settings file; None takes `postroom.toml` of the working directory if it is there.

    Raises: InvalidSettings naming the setting and where it came from.
    """
    path, tables = _read_file(config)
    values: dict[str, Any] = {}
    for name in _SCALARS:
        sources = (
            (flags.get(name), f"--{name.replace('_', '-')}"),
            (environment.get(PREFIX + name.upper()), PREFIX + name.upper()),
            (tables.get(name), f"{name} in {path}"),
        )
        found = next(((value, where) for value, where in sources if value is not None), None)
        if found is not None:
            values[name] = _scalar(name, *found)
    where = {name: f"[{name}] in {path}" for name in _TABLES}
    policy = _table(tables, "policy", where) | _from_environment("policy", environment)
    limits = _table(tables, "limits", where) | _from_environment("limits", environment)
    values["policy"] = make_policy(TopicPolicy(), policy, where["policy"])
    values["limits"] = _build(MailboxLimits(), limits, where["limits"])
    values["topics"] = {
        _named(topic, check_topic, where["topics"]): make_policy(
            values["policy"],
            _table(_table(tables, "topics", where), topic, {topic: f"[topics.{topic!r}] in {path}"}),
            f'[topics."{topic}"] in {path}',
        )
        for topic in _table(tables, "topics", where)
    }
    values["sections"] = {
        name: _table(tables, name, {name: f"[{name}] in {path}"}) | _from_environment(name, environment)
        for name in SECTIONS
    }
    return Settings(**values, file=path if tables else None)


def make_policy(base: TopicPolicy, changes: Mapping[str, object], where: str) -> TopicPolicy:
    """Return a topic policy with some fields changed.

    Arguments:
        changes: by field; a duration may leave the `_ms` of its name out and be written like `30s`.
        where: where the changes came from, for the message.

    Raises: InvalidSettings for an unknown field or a value out of bounds.
    """
    policy = _build(base, changes, where)
    try:
        return policy.validate()
    except InvalidRequest as error:
        raise InvalidSettings(f"{where}: {error}") from error


def _read_file(config: str | None) -> tuple[str, dict[str, Any]]:
    path = Path(config or FILE)
    if config is None and not path.exists():
        return FILE, {}
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise InvalidSettings(
            f"The settings file {path} can't be read: {error.strerror or error}."
        ) from error
    except ValueError as error:
        raise InvalidSettings(f"The settings file {path} is not valid TOML: {error}.") from error
    for key in tables:
        if key not in (known := (*_SCALARS, *_TABLES, *SECTIONS)):
            raise InvalidSettings(f"{path} has no setting {key!r}{unknown_key(key, known)}.")
    return str(path), tables


def _scalar(name: str, value: object, where: str) -> object:
    if name.endswith("_ms"):
        return _number(name, value, where)
    if name == "mailbox":
        return _named(value, check_mailbox, where)
    allowed = {"durability": ("full", "relaxed"), "log_level": ("debug", "info", "warning", "error")}.get(
        name
    )
    if allowed is not None and value not in allowed:
        raise InvalidSettings(f"{where} is {value!r}; it must be one of {', '.join(allowed)}.")
    if not isinstance(value, str) or not value:
        raise InvalidSettings(f"{where} is {value!r}; it must be text.")
    if name == "store" and "://" in value and not value.startswith(_DATABASES):
        raise InvalidSettings(
            f"{where} begins with {value.partition('://')[0]}://; a store is a file, memory: or "
            "postgresql://user@host/database."
        )
    return value


def _named(value: object, check: Any, where: str) -> str:
    try:
        name: str = check(str(value))
    except InvalidRequest as error:
        raise InvalidSettings(f"{where}: {error}") from error
    return name


def _table(tables: Mapping[str, Any], name: str, where: Mapping[str, str]) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise InvalidSettings(f"{where[name]} must be a table, not {table!r}.")
    return table


def _from_environment(table: str, environment: Mapping[str, str]) -> dict[str, str]:
    prefix = f"{PREFIX}{table.upper()}__"
    return {
        name[len(prefix) :].lower(): value for name, value in environment.items() if name.startswith(prefix)
    }


def _build(base: Struct, changes: Mapping[str, object], where: str) -> Struct:
    fields = base.__struct_fields__
    values: dict[str, int] = {}
    for key, value in changes.items():
        name = f"{key}_ms" if f"{key}_ms" in fields else key
        if name not in fields:
            raise InvalidSettings(f"{where} has no key {key!r}{unknown_key(key, fields)}.")
        values[name] = _number(name, value, f"{where}: {key}")
        if values[name] < 1:
            raise InvalidSettings(f"{where}: {key} must be at least 1; it was {value}.")
    return msgspec.structs.replace(base, **values)


def _number(name: str, value: object, where: str) -> int:
    text = str(value)
    if isinstance(value, int | str) and not isinstance(value, bool):
        if text.lstrip("-").isdecimal():
            return int(text)
        if name.endswith("_ms"):
            try:
                return parse_duration(text)
            except WrongUsage as error:
                raise InvalidSettings(f"{where}: {error}") from error
    kind = "milliseconds, or a duration such as '5s'" if name.endswith("_ms") else "a whole number"
    raise InvalidSettings(f"{where} is {value!r}; it must be {kind}.")


def unknown_key(key: str, known: tuple[str, ...]) -> str:
    """Return the end of a sentence about a key that nobody knows: what may have been meant."""
    close = get_close_matches(key, known, 1)
    return f"; did you mean {close[0]}?" if close else f"; it knows {', '.join(known)}"
