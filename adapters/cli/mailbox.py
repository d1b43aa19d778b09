"""`postroom mailbox` and `apply`: list mailboxes, show and change their settings."""

from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.output import Prose
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import FILE, InvalidSettings, find_field, parse_fields
from postroom.adapters.cli.values import DIFFERS, REFUSED, WrongUsage, Yes, exact_duration, parse_pairs
from postroom.application.queries.preview_settings import LosesData, check_losses, describe_effect
from postroom.domain.errors import Difference, InvalidRequest, NotFound, show_setting
from postroom.domain.mailbox.topic_decisions import SettingsPreview
from postroom.domain.names import describe_choices
from postroom.domain.policy import MailboxLimits, TopicPolicy
from postroom.domain.settings import (
    MailboxSettings,
    SettingsChanges,
    change_settings,
    compare_settings,
    list_settings,
)

if TYPE_CHECKING:
    from postroom.adapters.compose.connect import StoreMailbox
    from postroom.application.operations.mailbox import Mailbox


_TABLES = ("limits", "policy")
_TOPICS = "topics."
Apply = Annotated[
    bool, Option("--apply", help="Make the settings of the mailbox equal to the settings file first.")
]


async def list_mailboxes(session: Session) -> None:
    """List the mailboxes of a store: mode, current owner, and size of the log."""
    from postroom.adapters.compose.queries import describe_mailboxes

    names = session.mailboxes()
    mailboxes = [each for each in await describe_mailboxes(session.store) if each.mailbox in names]
    session.out.records(
        {"mailboxes": mailboxes},
        ("mailbox", "mode", "owner", "epoch", "records", "size"),
        mailboxes,
        lambda each: (
            each.mailbox,
            each.mode,
            each.owner or "none",
            each.epoch,
            each.records,
            _size(each.bytes),
        ),
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
    async with session.use_any(create=True, gives_settings=False) as mailbox:
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
    """Note the name under which a field is set; refuse a second name, as one of the two would be ignored."""
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


async def apply(
    session: Session,
    file: Annotated[
        str | None, Argument(metavar="[FILE]", help="Settings file; default --config, or ./postroom.toml.")
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Show the changes, and make none.")] = False,
    check: Annotated[
        bool, Option("--check", help="Show the changes, make none, and exit with code 6 if there are any.")
    ] = False,
    yes: Yes = False,
) -> int:
    """Make the settings of the mailbox, and the streams of NATS, equal to the settings file.

    The mailbox gets [limits], [policy], [topics] and the topics of [erasure]; fields that the file leaves out
    get their defaults. It is created if it does not exist. Streams and consumers are created and updated as
    by streams apply.
    """
    if file is not None:
        session = session.with_settings(session.load(file))
    if session.settings.file is None:
        raise InvalidSettings(f"There is no settings file {FILE} to apply; name one.")
    if dry_run or check:
        preview = _preview(session)
        show_preview(session, preview)
        differs = preview.before != preview.after
        if _has_streams(session):
            from postroom.adapters.cli.streams import diff

            differs |= bool(await diff(session))
        return DIFFERS if check and differs else 0
    has_streams = _has_streams(session)
    if has_streams:
        from postroom.adapters.cli.streams import read_definitions

        read_definitions(session.settings)  # so that invalid definitions also leave the mailbox unchanged
    async with session.use_any(create=True, gives_settings=False) as mailbox:
        if not await change(session, mailbox, _file_settings(session), replace=True, yes=yes):
            return REFUSED
    if has_streams:
        from postroom.adapters.cli.streams import apply as apply_streams

        return await apply_streams(session, yes=yes)
    return 0


@asynccontextmanager
async def use_applied(
    session: Session, *, apply: bool, amnesia: bool = False, in_thread: bool = True
) -> AsyncIterator["StoreMailbox"]:
    """Use the mailbox as `Session.use_any` does; with `apply`, first make its settings equal to the file.

    Raises: LosesData, and the errors of `Session.use_any`.
    """
    async with session.use_any(
        create=True, amnesia=amnesia, gives_settings=not apply, in_thread=in_thread
    ) as mailbox:
        if apply:
            await _apply_at_start(session, mailbox)
        yield mailbox


async def _apply_at_start(session: Session, mailbox: "Mailbox") -> None:
    """Make the settings of the mailbox equal to the file, and note what changed."""
    preview = await mailbox.preview_settings(_file_settings(session), replace=True)
    check_losses(preview, "--apply")
    await mailbox.set_settings(_file_settings(session), replace=True)
    for each in compare_settings(preview.before, preview.after):
        session.out.note(f"{each.name} changed from {_shown(each, 1)} to {_shown(each, 2)}.")


async def change(
    session: Session, mailbox: "Mailbox", changes: SettingsChanges, *, replace: bool = False, yes: bool
) -> bool:
    """Show a change of settings and make it; ask before anything is lost.

    Returns: False if the answer was no.
    Raises: InvalidSettings; LosesData if nobody can be asked.
    """
    with invalid_settings():
        preview = await mailbox.preview_settings(changes, replace=replace)
    show_preview(session, preview)
    if not confirm(session, preview, yes=yes):
        return False
    await mailbox.set_settings(changes, replace=replace)
    return True


@contextmanager
def invalid_settings() -> Iterator[None]:
    """Raise InvalidSettings in place of a mailbox's InvalidRequest, but not of its subclasses."""
    try:
        yield
    except InvalidRequest as error:
        if type(error) is not InvalidRequest:
            raise
        raise InvalidSettings(str(error)) from error


def confirm(session: Session, preview: SettingsPreview, *, yes: bool) -> bool:
    """Return whether a change of settings may be made; ask if something would be lost.

    Raises: LosesData if nobody can be asked.
    """
    if preview.losses and not yes:
        losses = "; ".join(map(describe_effect, preview.losses))
        refusal = LosesData(f"Nothing was changed, as this would lose data: {losses}. To confirm, add --yes.")
        if not session.out.confirm(f"{losses}. Apply these changes?", refusal):
            session.out.note("Nothing was changed.")
            return False
    return True


def show_preview(session: Session, preview: SettingsPreview) -> None:
    """Show the settings that a change changes, and its effects."""
    differences = compare_settings(preview.before, preview.after)
    if session.out.as_json:
        facts = {"mailbox": session.mailbox, "effects": preview.effects}
        changes = [{"name": name, "current": current, "new": new} for name, current, new in differences]
        session.out.json(facts | {"changes": changes})
        return
    if not differences:
        session.out.prose(f"{session.mailbox} has these settings already.")
        return
    rows = [(Prose(each.name.removesuffix("_ms")), _shown(each, 1), _shown(each, 2)) for each in differences]
    session.out.table(("setting", "current", "new"), rows)
    for effect in preview.effects:
        session.out.note(f"{describe_effect(effect)}.")


def describe_change(change: Difference) -> str:
    """Return a change of a setting as a clause, with both values as a settings file may have them."""
    return f"{change.name.removesuffix('_ms')} from {_shown(change, 1)} to {_shown(change, 2)}"


def show_value(name: str, value: object) -> str | None:
    """Return the value of a setting as a settings file may have it; None if it is unset."""
    if value is None or isinstance(value, str):
        return value
    return exact_duration(int(str(value))) if name.endswith("_ms") else show_setting(value)


def _shown(difference: Difference, side: int) -> str:
    return show_value(difference.name, difference[side]) or "unset"


def _preview(session: Session) -> SettingsPreview:
    """Return what `apply` would do, without owning or creating the mailbox."""
    from postroom.adapters.compose import list_mailboxes

    changes = _file_settings(session)
    with suppress(NotFound):
        if session.mailbox in list_mailboxes(session.existing_store()):
            with session.read(session.mailbox) as reader:
                return reader.preview_settings(changes, replace=True)
    return SettingsPreview(MailboxSettings(), change_settings(MailboxSettings(), changes))


def _file_settings(session: Session) -> SettingsChanges:
    erasure = session.erasure_settings()
    return msgspec.structs.replace(
        session.settings.mailbox_settings(), subject_policies={} if erasure is None else erasure.topics
    )


def _has_streams(session: Session) -> bool:
    return any(session.settings.sections.get(name) for name in ("streams", "consumers"))
