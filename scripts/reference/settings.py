"""The reference of the settings file, from the structs of its sections."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from postroom.adapters.cli.config import STRUCTS
from postroom.adapters.cli.remote import ClientSettings
from postroom.adapters.cli.settings import SECTIONS, Settings
from postroom.adapters.cli.values import exact_duration
from postroom.adapters.compose.brokers import ConsumerDefinition, StreamDefinition
from postroom.adapters.compose.outbox import CaptureSettings
from postroom.adapters.compose.schedule import ScheduleSettings
from postroom.domain.arguments import MAX_INT
from postroom.domain.errors import InvalidRequest, show_setting
from postroom.domain.policy import MailboxLimits, TopicPolicy
from scripts.operations import describe_type, read_docstring
from scripts.reference.tables import code, link_adrs, table

HEAD = """# Settings

Every section and key of `postroom.toml`, with type, bounds and default. Options of the command line
override the environment, which overrides the file, which overrides the defaults; [the command
line](../command-line.md#settings) describes this, and `postroom config show` prints the settings in force
with their sources.

The variable of the key `http` in `[serve]` is `POSTROOM_SERVE__HTTP`, that of `store` is
`POSTROOM_STORE`. A duration is text such as `500ms`, `5s`, `2m`, `1h` or `7d`; its key may also be
written with `_ms` and a number of milliseconds. Sizes are in bytes.

Written by `make operations` from the structs that read the file.
"""
GROUPS: Mapping[str, type[msgspec.Struct]] = {
    "schedules": ScheduleSettings,
    "streams": StreamDefinition,
    "consumers": ConsumerDefinition,
}
"""Sections of tables whose names the user chooses, and the struct of each table."""
STRUCTS_BY_SECTION: Mapping[str, type[msgspec.Struct]] = {
    "policy": TopicPolicy,
    "limits": MailboxLimits,
    **STRUCTS,
    "capture": CaptureSettings,
    "client": ClientSettings,
}
PAGES = {
    "policy": "command-line.md#settings-of-a-mailbox",
    "limits": "command-line.md#settings-of-a-mailbox",
    "nats": "streams.md#access-to-nats",
    "kafka": "outbox.md#targets",
    "rabbitmq": "outbox.md#targets",
    "messaging": "outbox.md#set-up",
    "outbox": "outbox.md#relay",
    "capture": "capture.md",
    "inbox": "inbox.md",
    "streams": "streams.md#streams",
    "consumers": "streams.md#consumers",
    "archive": "operations.md#segments",
    "search": "spark.md#spark-submit",
    "engine": "spark.md#engines",
    "owner": "clients.md#who-owns-the-mailbox",
    "erasure": "erasure.md",
    "relay": "workers.md#send-in-your-own-transaction",
    "schedules": "workers.md#schedules",
    "serve": "service.md#settings",
    "console": "console.md#settings",
    "mcp": "mcp.md#settings",
    "audit": "capabilities.md#auditing",
    "tracing": "observability.md#traces",
    "access": "capabilities.md#settings",
    "client": "service.md#access",
    "cluster": "cluster.md#on-several-hosts",
    "admin": "command-line.md#admins-leases-and-routes",
    "runner": "command-line.md#runners",
    "proxy": "command-line.md#proxies",
}
"""Where each section is explained."""
NAMES = {
    StreamDefinition: ("name",),
    ConsumerDefinition: ("durable", "server_max_deliver"),
    Settings: ("policy", "topics", "limits", "file", "sections", "sources"),
}
"""Fields that are not keys of their section."""
COLUMNS = ("key", "type and bounds", "default", "meaning")


class Row(msgspec.Struct, frozen=True):
    """A setting: its key and the cells of its row, in Markdown."""

    key: str
    type: str
    default: str
    meaning: str


def make_settings_page() -> str:
    """Return the page."""
    parts = [HEAD, "\n## Top level\n\n", _table(rows(Settings))]
    for section in ("policy", "topics", "limits", *SECTIONS):
        parts.append(f"\n## {section}\n\n")
        if section == "topics":
            parts.append(
                '`[topics."orders"]` or `[topics."orders.*"]`: the keys of `[policy]`, for one topic or for '
                "all that match a glob. What a section leaves out comes from less specific ones, and from "
                "`[policy]`.\n"
            )
            continue
        name = f"[{section}.NAME]" if section in GROUPS else f"[{section}]"
        parts.append(f"`{name}`; see [{PAGES[section].partition('#')[0]}](../{PAGES[section]}).\n\n")
        parts.append(_table(rows(GROUPS.get(section) or STRUCTS_BY_SECTION[section])))
    return "".join(parts)


def _table(found: Iterator[Row]) -> str:
    return table(COLUMNS, ((code(each.key), each.type, each.default, each.meaning) for each in found))


def rows(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[Row]:
    """Yield the settings of a struct; those of a struct in it have its name and a dot before theirs."""
    hints, meanings = get_type_hints(struct, include_extras=True), _meanings(struct)
    for field in msgspec.structs.fields(struct):
        if field.name in NAMES.get(struct, ()):
            continue
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from rows(hint, f"{prefix}{field.encode_name}.")
            continue
        if get_origin(hint) in (dict, Mapping) and isinstance(get_args(hint)[1], type(msgspec.Struct)):
            yield from rows(get_args(hint)[1], f"{prefix}{field.encode_name}.NAME.")
            continue
        is_duration = field.name.endswith("_ms")
        kind = "duration" if is_duration else _describe(hint)
        bounds = _bounds(struct, field.name, hint, is_duration)
        yield Row(
            prefix + field.encode_name.removesuffix("_ms"),
            f"{kind}, {bounds}" if bounds else kind,
            _default(field, is_duration),
            _prose(meanings.get(field.name, "")),
        )


def _meanings(struct: type) -> dict[str, str]:
    """Return what the docstrings of a struct and its bases say of each field."""
    found: dict[str, str] = {}
    for base in reversed(struct.__mro__):
        if base.__doc__ and issubclass(base, msgspec.Struct):
            docstring = re.sub(r"\nArguments[^:\n]*:\n", "\nArguments:\n", inspect.cleandoc(base.__doc__))
            found |= read_docstring(docstring)[1]
    return found


def _prose(text: str) -> str:
    """Return a meaning for readers of the file, in which None is a key that is left out."""
    text = re.sub(r" ?\((?:svc-mailbox|SDS-047|RFC-0\d\d)[^)]*\)", "", text)
    return link_adrs(re.sub(r"\bNone\b", "unset", re.sub(r"\. None\b", ". Unset", text)), "../adr")


def _describe(hint: Any) -> str:
    """Return a type in words."""
    arguments = [each for each in get_args(hint) if each is not type(None)]
    origin = get_origin(hint)
    if origin in (tuple, list):
        return f"list of {_describe(arguments[0])}"
    if origin in (dict, Mapping):
        return f"table of {_describe(arguments[1])} by name"
    if len(arguments) < len(get_args(hint)):
        return " or ".join(map(_describe, arguments))
    if origin is not None and hint not in (int, str) and any(get_origin(each) for each in arguments):
        return " or ".join(map(_describe, arguments))
    words = {"`int`": "whole number", "`str`": "text", "`bool`": "`true` or `false`", "`float`": "number"}
    text = describe_type(hint)
    for name, word in words.items():
        text = text.replace(name, word)
    return text


def _default(field: Any, is_duration: bool) -> str:
    """Return a default as the file has it."""
    if field.required:
        return "required"
    value = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
    if value is None or value in ("", (), {}, []):
        return ""
    if is_duration:
        return code(exact_duration(value))
    if isinstance(value, list | tuple):
        return ", ".join(map(code, value))
    return f"{value:,}" if type(value) is int else code(show_setting(value))


def _bounds(struct: type[msgspec.Struct], name: str, hint: Any, is_duration: bool) -> str:
    """Return the bounds of a number: those of its type, or those that the errors beyond them name."""
    for meta in getattr(hint, "__metadata__", ()):
        if isinstance(meta, msgspec.Meta):
            return _show_bounds(meta.ge, meta.le, is_duration) if is_duration else ""
    if not any(field.required for field in msgspec.structs.fields(struct)):
        default = struct()
        if type(getattr(default, name)) is int:
            low, high = (_limit(default, name, value) for value in (-1, MAX_INT))
            return _show_bounds(low, high, is_duration)
    return ""


def _limit(default: msgspec.Struct, name: str, value: int) -> int | None:
    """Return the limit that the refusal of a value names; None if it is accepted."""
    changed = msgspec.structs.replace(default, **{name: value})
    try:
        getattr(changed, "validate", lambda: None)()
    except InvalidRequest as error:
        stated = re.search(rf"{name} must be at (?:least|most) (\d+); it was", str(error))
        return int(stated[1]) if stated else None
    return None


def _show_bounds(low: int | None, high: int | None, is_duration: bool) -> str:
    show = exact_duration if is_duration else "{:,}".format
    if low is not None and high is not None:
        return f"{show(low)} to {show(high)}"
    return f"at least {show(low)}" if low is not None else f"at most {show(high)}" if high is not None else ""
