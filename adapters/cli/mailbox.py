"""`postroom mailbox`: list the mailboxes of a store, show and change their settings."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.apply import Yes, change, show_value
from postroom.adapters.cli.exit_codes import REFUSED
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import find_field, parse_fields
from postroom.adapters.cli.tables import Prose
from postroom.adapters.cli.values import WrongUsage, parse_pairs
from postroom.domain.names import describe_choices
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import MailboxSettings, SettingsChanges, list_settings

_TABLES = ("limits", "policy")
_TOPICS = "topics."


async def list_mailboxes(session: Session) -> None:
    """List the mailboxes of a store: mode, current owner, and size of the log."""
    from postroom.adapters.compose.queries import describe_mailboxes

    names = session.mailboxes()
    mailboxes = [each for each in await describe_mailboxes(session.store) if each.mailbox in names]
    if session.out.as_json:
        session.out.json({"mailboxes": mailboxes})
        return
    session.out.table(
        ("mailbox", "mode", "owner", "epoch", "records", "size"),
        [
            (each.mailbox, each.mode, each.owner or "none", each.epoch, each.records, _size(each.bytes))
            for each in mailboxes
        ],
    )


def show(session: Session) -> None:
    """Show the settings of the mailbox, which are the same whoever owns it."""
    with session.read(session.mailbox) as reader:
        settings = reader.get_settings()
    if session.out.as_json:
        session.out.json({"mailbox": session.mailbox, "settings": settings})
        return
    defaults = list_settings(MailboxSettings())
    session.out.table(
        ("setting", "value", "default"),
        [
            (
                Prose(name.removesuffix("_ms")),
                show_value(name, value) or "unset",
                "" if value == defaults.get(name) else show_value(name, defaults.get(name)) or "unset",
            )
            for name, value in list_settings(settings).items()
        ],
    )


async def set_settings(
    session: Session,
    changes: Annotated[
        list[str] | None,
        Argument(
            metavar="[NAME=VALUE]...",
            help="Such as policy.visibility=1m, limits.topics=200 or 'topics.payments.*.max_attempts=3'.",
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        Option("--unset", metavar="NAME", help="Setting or section of topics to remove."),
    ] = None,
    yes: Yes = False,
) -> int:
    """Change settings of the mailbox, for its current and future messages; the others stay as they are."""
    pairs = parse_pairs(changes or (), "Change")
    if not pairs and not unset:
        raise WrongUsage("Nothing to change; pass NAME=VALUE or --unset NAME.")
    parsed = parse_changes(pairs, unset or ())
    async with session.use(create=True, gives_settings=False) as mailbox:
        if not await change(session, mailbox, parsed, yes=yes):
            return REFUSED
    return 0


def parse_changes(pairs: Mapping[str, str], unset: Iterable[str] = ()) -> SettingsChanges:
    """Return the changes that `NAME=VALUE` and `--unset NAME` express.

    Raises: WrongUsage for an unknown name, or a setting that is named twice; InvalidSettings for a value of a
        wrong type.
    """
    named: dict[tuple[str, str], str] = {}
    sections: dict[str, dict[str, Any]] = {table: {} for table in _TABLES}
    for name, value in pairs.items():
        section, key = _split(name)
        ((field, parsed),) = parse_fields(_defaults(section, name), {key: value}, name).items()
        _note(named, section, field, name)
        sections.setdefault(section, {})[field] = parsed
    removed: dict[str, None] = {}
    for name in dict.fromkeys(unset):
        section, key = _split(name)
        of_topic = find_field(key, TopicPolicy.__struct_fields__) if section.startswith(_TOPICS) else None
        if section in _TABLES:
            field, default = _default(_defaults(section, name), key, name)
            _note(named, section, field, f"--unset {name}")
            sections[section][field] = default
        elif of_topic is not None:
            _note(named, section, of_topic, f"--unset {name}")
            sections.setdefault(section, {})[of_topic] = None
        else:
            removed[_pattern(name, name)] = None
    for pattern in removed:
        for other in sections.pop(f"{_TOPICS}{pattern}", ()):
            _note(named, f"{_TOPICS}{pattern}", other, f"--unset {_TOPICS}{pattern}")
    limits, policy = sections.pop("limits"), sections.pop("policy")
    topics = {section.removeprefix(_TOPICS): fields for section, fields in sections.items()}
    return SettingsChanges(limits, policy, {**topics, **removed})


def _split(name: str) -> tuple[str, str]:
    section, _, key = name.rpartition(".")
    return section, key


def _note(named: dict[tuple[str, str], str], section: str, field: str, label: str) -> None:
    """Note how a field of a section is named; refuse two ways, as one of them would be ignored."""
    first = named.setdefault((section, field), label)
    if first != label:
        raise WrongUsage(f"{first} and {label} name the same setting; keep one.")


def _defaults(section: str, name: str) -> MailboxLimits | TopicPolicy:
    if section == "limits":
        return MailboxLimits()
    if section != "policy":
        _pattern(section, name)
    return TopicPolicy()


def _pattern(section: str, name: str) -> str:
    pattern = section.removeprefix(_TOPICS)
    if pattern == section or not pattern:
        raise WrongUsage(
            f"There is no setting {name}; write limits.NAME, policy.NAME or topics.TOPIC.NAME, where TOPIC "
            "may be a glob. The topics of [erasure] are changed by postroom apply."
        )
    return pattern


def _default(defaults: msgspec.Struct, key: str, name: str) -> tuple[str, Any]:
    field = find_field(key, defaults.__struct_fields__)
    if field is None:
        raise WrongUsage(f"There is no setting {name}; {describe_choices(key, defaults.__struct_fields__)}")
    return field, getattr(defaults, field)


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
