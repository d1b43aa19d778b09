"""`postroom mailbox`: list the mailboxes of a store, show and change their settings."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.apply import Yes, change, show_value
from postroom.adapters.cli.exit_codes import REFUSED
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import parse_fields
from postroom.adapters.cli.tables import Prose
from postroom.adapters.cli.values import WrongUsage, parse_pairs
from postroom.domain.names import describe_choices
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import MailboxSettings, SettingsChanges, list_settings


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
    async with session.use(create=True, gives_settings=False) as mailbox:
        if not await change(session, mailbox, parse_changes(pairs, unset or ()), yes=yes):
            return REFUSED
    return 0


def parse_changes(pairs: Mapping[str, str], unset: Iterable[str] = ()) -> SettingsChanges:
    """Return the changes that `NAME=VALUE` and `--unset NAME` express.

    Raises: WrongUsage for an unknown name, InvalidSettings for a value of the wrong type or out of bounds.
    """
    limits: dict[str, Any] = {}
    policy: dict[str, Any] = {}
    topics: dict[str, dict[str, Any] | None] = {}
    for name, value in pairs.items():
        section, _, key = name.rpartition(".")
        if section == "limits":
            limits |= parse_fields(MailboxLimits(), {key: value}, name)
        elif section == "policy":
            policy |= parse_fields(TopicPolicy(), {key: value}, name)
        else:
            fields = topics.setdefault(_pattern(section, name), {})
            assert fields is not None
            fields |= parse_fields(TopicPolicy(), {key: value}, name)
    for name in unset:
        section, _, key = name.rpartition(".")
        if section == "limits":
            limits |= _default(MailboxLimits(), key, name)
        elif section == "policy":
            policy |= _default(TopicPolicy(), key, name)
        elif section.startswith("topics.") and _field(TopicPolicy(), key) is not None:
            fields = topics.setdefault(_pattern(section, name), {})
            assert fields is not None
            fields[str(_field(TopicPolicy(), key))] = None
        else:
            topics[_pattern(name, name)] = None
    return SettingsChanges(limits, policy, topics)


def _pattern(section: str, name: str) -> str:
    pattern = section.removeprefix("topics.")
    if pattern == section or not pattern:
        raise WrongUsage(
            f"There is no setting {name}; write limits.NAME, policy.NAME or topics.TOPIC.NAME, where TOPIC "
            "may be a glob. The topics of [erasure] are changed by postroom apply."
        )
    return pattern


def _default(defaults: msgspec.Struct, key: str, name: str) -> dict[str, Any]:
    field = _field(defaults, key)
    if field is None:
        raise WrongUsage(f"There is no setting {name}; {describe_choices(key, defaults.__struct_fields__)}")
    return {field: getattr(defaults, field)}


def _field(defaults: msgspec.Struct, key: str) -> str | None:
    return next((each for each in (f"{key}_ms", key) if each in defaults.__struct_fields__), None)


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
