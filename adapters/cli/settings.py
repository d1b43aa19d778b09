"""Settings from flags, environment (`POSTROOM_*`), `postroom.toml` and defaults, in order of precedence.

The structs of policies and limits are their schema; a settings framework would add 0.2 s to every start.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from postroom.adapters.cli.logs import LEVELS, read_levels
from postroom.adapters.cli.values import WrongUsage, parse_duration, parse_integer
from postroom.application.text import parse_weights
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import check_mailbox, check_member, check_topic
from postroom.domain.policy import MAX_DURATION_MS, MailboxLimits, PolicyValue, TopicPolicy

if TYPE_CHECKING:
    from postroom.domain.settings import SettingsChanges

FILE = "postroom.toml"
PREFIX = "POSTROOM_"

Struct = TypeVar("Struct", bound=msgspec.Struct)
Bounded = TypeVar("Bounded", TopicPolicy, MailboxLimits)


class InvalidSettings(WrongUsage):
    """A setting is invalid; the message names it and its source."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings in force.

    Arguments:
        store: path of a SQLite file, `postgresql://...`, or `memory:`. None for the default of the command.
        mailbox: `namespace@proxy`, or a namespace, a group of mailboxes. None for the default.
        durability: `full` survives power cuts, `relaxed` only crashes of processes.
        log_level: `debug`, `info`, `warning` or `error`, also of single loggers, such as `info,shop=debug`.
        log_format: `auto` is `console` on a terminal, else `json`.
        timeout_ms: how long to wait for the owner of the mailbox.
        policy, limits: settings of mailboxes, with defaults; see `mailbox_settings`.
        topics: fields of the policies of topics, by name or glob.
        file: the settings file that was read, if any.
        sources: where each setting that is not a default comes from, by name, such as `policy.max_attempts`.
    """

    store: str | None = None
    mailbox: str | None = None
    durability: Literal["full", "relaxed"] = "full"
    log_level: str = "warning"
    log_format: Literal["auto", "console", "json"] = "auto"
    timeout_ms: int = 10_000
    policy: TopicPolicy = TopicPolicy()
    topics: dict[str, dict[str, PolicyValue]] = {}
    limits: MailboxLimits = MailboxLimits()
    file: str | None = None
    sections: Mapping[str, Mapping[str, Any]] = {}
    sources: Mapping[str, str] = {}

    def mailbox_settings(self) -> "SettingsChanges":
        """Return the settings of mailboxes that the file and the environment have, without defaults.

        A new mailbox gets them, and an existing mailbox must have them.
        """
        from postroom.domain.settings import SettingsChanges

        return SettingsChanges(
            self._set_fields("limits", self.limits), self._set_fields("policy", self.policy), self.topics
        )

    def _set_fields(self, table: str, values: msgspec.Struct) -> dict[str, Any]:
        names = {name.removeprefix(f"{table}.") for name in self.sources if name.startswith(f"{table}.")}
        return {
            name: getattr(values, name)
            for name in values.__struct_fields__
            if not names.isdisjoint((name, name.removesuffix("_ms")))
        }

    def section(self, name: str, kind: type[Struct], flags: Mapping[str, object] | None = None) -> Struct:
        """Return the settings of one command group, such as `[nats]` or `POSTROOM_NATS__URL`.

        Arguments:
            name: one of `SECTIONS`.
            kind: its fields; a duration `x_ms` may be set as `x` in a form such as `30s`.
            flags: values of the command line by field; None for omitted flags.

        Raises: InvalidSettings for an unknown key, a missing one, or a value that is invalid or out of range,
            so that every command refuses the same settings.
        """
        where = f"[{name}] in {self.file or FILE}, or {PREFIX}{name.upper()}__"
        fields = kind.__struct_fields__
        values: dict[str, object] = {}
        for field, (key, value) in _by_field(self.sections.get(name, {}), fields, where).items():
            values[field] = (
                _number(key, value, f"{where}: {key}", is_duration=True) if field.endswith("_ms") else value
            )
        values |= {key: value for key, value in (flags or {}).items() if value is not None}
        try:
            section = msgspec.convert(values, kind, strict=False)
            if (validate := getattr(section, "validate", None)) is not None:  # not all have bounds
                validate()
        except msgspec.ValidationError as error:
            raise InvalidSettings(f"{where}: {error}.") from None
        except InvalidRequest as error:
            raise InvalidSettings(f"{where}: {error}") from error
        return section


_CHOICES = {"durability": ("full", "relaxed"), "log_format": ("auto", "console", "json")}
_SCALARS = ("store", "mailbox", *_CHOICES, "log_level", "timeout_ms")
_TABLES = ("policy", "topics", "limits")
_SERVERS = ("postgresql://", "postgres://", "nats://")
SECTIONS = (
    "nats",
    "kafka",
    "rabbitmq",
    "messaging",
    "outbox",
    "capture",
    "inbox",
    "streams",
    "consumers",
    "archive",
    "search",
    "engine",
    "owner",
    "erasure",
    "relay",
    "schedules",
    "serve",
    "console",
    "mcp",
    "audit",
    "tracing",
    "access",
    "client",
    "cluster",
    "admin",
    "runner",
    "proxy",
)
"""Tables of the settings file that commands validate when they need them."""


def load_settings(
    flags: Mapping[str, str | None], environment: Mapping[str, str], config: str | None = None
) -> Settings:
    """Return the settings in force.

    Arguments:
        flags: values of the command line by field; None for omitted flags.
        config: path of the settings file; None for `postroom.toml` of the working directory, if it exists.

    Raises: InvalidSettings naming the setting and its source.
    """
    file, tables = _read_file(config)
    path = file or FILE
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for name in _SCALARS:
        sources = (
            (flags.get(name), f"--{name.replace('_', '-')}"),
            (environment.get(PREFIX + name.upper()), PREFIX + name.upper()),
            (tables.get(name), f"{name} in {path}"),
        )
        source = next((each for each in sources if each[0] is not None), None)
        if source is not None:
            values[name] = _scalar(name, *source)
            origins[name] = source[1].removeprefix(f"{name} in ")
    where = {name: f"[{name}] in {path}" for name in _TABLES}
    merged: dict[str, dict[str, Any]] = {}
    for name in ("policy", "limits", *SECTIONS):
        where.setdefault(name, f"[{name}] in {path}")
        table, variables = _table(tables, name, where), _from_environment(name, environment)
        if variables:
            where[name] += f", or {PREFIX}{name.upper()}__"
        overridden = {key.removesuffix("_ms") for key in variables}
        from_file = {key: value for key, value in table.items() if key.removesuffix("_ms") not in overridden}
        merged[name] = from_file | variables
        origins |= {f"{name}.{key}": path for key in from_file}
        origins |= {f"{name}.{key}": f"{PREFIX}{name.upper()}__{key.upper()}" for key in variables}
    values["policy"] = change_fields(TopicPolicy(), merged["policy"], where["policy"])
    values["limits"] = change_fields(MailboxLimits(), merged["limits"], where["limits"])
    values["topics"] = {
        _check_name(topic, _check_pattern, where["topics"]): _make_section(
            values["policy"],
            _table(_table(tables, "topics", where), topic, {topic: f"[topics.{topic!r}] in {path}"}),
            f'[topics."{topic}"] in {path}',
        )
        for topic in _table(tables, "topics", where)
    }
    if values["topics"]:
        _check_topics(values["policy"], values["limits"], values["topics"], path)
    values["sections"] = {name: merged[name] for name in SECTIONS}
    if flags.get("token_file") is not None:
        values["sections"]["client"]["token_file"] = flags["token_file"]
    for topic, table in _table(tables, "topics", where).items():
        origins |= dict.fromkeys((f"topics.{topic}.{key}" for key in table), path)
    return Settings(**values, file=file, sources=origins)


def _make_section(base: TopicPolicy, changes: Mapping[str, object], where: str) -> dict[str, PolicyValue]:
    """Return the fields that a section of topics sets; raises as `change_fields`."""
    fields = parse_fields(base, changes, where)
    _validate(msgspec.structs.replace(base, **fields), where)
    return fields


def _check_topics(policy: TopicPolicy, limits: MailboxLimits, topics: dict[str, Any], path: str) -> None:
    """Check the sections of topics together, as the globs of several sections may match one topic."""
    from postroom.domain.settings import MailboxSettings

    try:
        MailboxSettings(limits, policy, topics).validate()
    except InvalidRequest as error:
        raise InvalidSettings(f"{path}: {error}") from error


def _check_pattern(pattern: str) -> str:
    check_topic(pattern.replace("*", "x"))
    return pattern


def change_fields(base: Bounded, changes: Mapping[str, object], where: str) -> Bounded:
    """Return a topic policy or limits with some fields changed.

    Arguments:
        changes: by field; a duration `x_ms` may be set as `x` in a form such as `30s`.
        where: source of the changes, for the message.

    Raises: InvalidSettings for an unknown field or a value out of bounds.
    """
    return _validate(msgspec.structs.replace(base, **parse_fields(base, changes, where)), where)


def _validate(values: Bounded, where: str) -> Bounded:
    try:
        values.validate()
    except InvalidRequest as error:
        raise InvalidSettings(f"{where}: {error}") from error
    return values


def _read_file(config: str | None) -> tuple[str | None, dict[str, Any]]:
    path = Path(config or FILE)
    try:
        content = path.read_bytes()
    except OSError as error:
        if config is None and isinstance(error, FileNotFoundError):
            return None, {}
        raise InvalidSettings(
            f"The settings file {path} can't be read: {error.strerror or error}."
        ) from error
    import tomllib  # slow to import, and most folders have no settings file

    try:
        tables = tomllib.loads(content.decode())
    except ValueError as error:
        raise InvalidSettings(f"The settings file {path} is not valid TOML: {error}.") from error
    for key in tables:
        if key not in (keys := (*_SCALARS, *_TABLES, *SECTIONS)):
            raise InvalidSettings(f"{path}: unknown setting {key!r}{unknown_key(key, keys)}")
    return str(path), tables


def _scalar(name: str, value: object, where: str) -> object:
    if name.endswith("_ms"):
        duration = _number(name, value, where, is_duration=True)
        if not 0 < duration <= MAX_DURATION_MS:
            raise InvalidSettings(f"{where} is {value!r}; expected a duration above 0, and below a century.")
        return duration
    if name == "mailbox":
        is_namespace = isinstance(value, str) and "@" not in value
        check = partial(check_member, "the name of a namespace") if is_namespace else check_mailbox
        return _check_name(value, check, where)
    choices = _CHOICES.get(name)
    if choices is not None and value not in choices:
        raise InvalidSettings(f"{where} is {value!r}; expected one of {', '.join(choices)}.")
    if not isinstance(value, str) or not value:
        raise InvalidSettings(f"{where} is {value!r}; expected non-empty text.")
    if name == "log_level" and read_levels(value) is None:
        raise InvalidSettings(
            f"{where} is {value!r}; expected one of {', '.join(LEVELS)}, or the levels of several loggers, "
            "such as info,shop=debug."
        )
    if name == "store" and "://" in value and not value.startswith(_SERVERS):
        from postroom.adapters.compose.store import is_remote

        if not is_remote(value):
            raise InvalidSettings(
                f"{where} begins with {value.partition('://')[0]}://; a store is a file, memory:, "
                "postgresql://user@host/database, nats://host,host,host/NAME or the URL of a server."
            )
    return value


def _check_name(value: object, check: Any, where: str) -> str:
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


def parse_fields(base: msgspec.Struct, changes: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return the values of some fields of a policy or of limits, whose bounds are not checked.

    Arguments: see `change_fields`.
    Raises: InvalidSettings for an unknown field, one under two names, or a value of a wrong type.
    """
    values: dict[str, Any] = {}
    for name, (key, value) in _by_field(changes, base.__struct_fields__, where).items():
        if type(getattr(base, name)) is bool:
            values[name] = _boolean(value, f"{where}: {key}")
        elif isinstance(getattr(base, name), Mapping):
            values[name] = _weights(value, f"{where}: {key}")
        else:
            values[name] = _number(key, value, f"{where}: {key}", is_duration=name.endswith("_ms"))
    return values


def find_field(key: str, fields: tuple[str, ...]) -> str | None:
    """Return the field that a key sets, or None; a duration `x_ms` may be set as `x`."""
    return next((each for each in (f"{key}_ms", key) if each in fields), None)


def _by_field(
    table: Mapping[str, object], fields: tuple[str, ...], where: str
) -> dict[str, tuple[str, object]]:
    """Return key and value by the field that they set."""
    values: dict[str, tuple[str, object]] = {}
    for key, value in table.items():
        field = find_field(key, fields)
        if field is None:
            raise InvalidSettings(f"{where}: unknown key {key!r}{unknown_key(key, fields)}")
        if field in values:
            raise InvalidSettings(f"{where}: {values[field][0]} and {key} are the same setting; keep one.")
        values[field] = key, value
    return values


def _boolean(value: object, where: str) -> bool:
    if isinstance(value, bool):
        return value
    if value not in ("true", "false"):
        raise InvalidSettings(f"{where} is {value!r}; expected true or false.")
    return value == "true"


def _weights(value: object, where: str) -> dict[str, int]:
    """Return weights of keys from a table, a JSON object, or text such as `a:3,b:2`."""
    if (weights := parse_weights(value)) is not None:
        return weights
    raise InvalidSettings(
        f"{where} is {value!r}; expected weights such as a:3,b:2, each key once, or a JSON object such as "
        '{"a,b": 3} if a key has a comma.'
    )


def _number(key: str, value: object, where: str, *, is_duration: bool) -> int:
    """Return a number, or a duration in ms; a bare number is a duration only if the key ends with `_ms`."""
    text = str(value)
    is_ms = key.endswith("_ms")
    if isinstance(value, int | str) and not isinstance(value, bool):
        number = parse_integer(text)
        if number is not None and (is_ms or not is_duration):
            return number
        if is_duration:
            try:
                return parse_duration(text)
            except WrongUsage as error:
                raise InvalidSettings(f"{where}: {error}") from error
    kind = "a whole number"
    if is_duration:
        kind = "milliseconds, or a duration such as '5s'" if is_ms else "a duration such as '5s'"
    raise InvalidSettings(f"{where} is {value!r}; expected {kind}.")


def unknown_key(key: str, keys: tuple[str, ...]) -> str:
    """Return the end of a sentence about an unknown key, with its full stop: the closest key, or all keys."""
    close = get_close_matches(key, keys, 1)
    return f"; did you mean {close[0]}?" if close else f"; expected one of {', '.join(keys)}."
