"""`PreviewSettings`: the effects of a change of the mailbox's settings on its messages."""

from collections.abc import Callable

import msgspec

from postroom.application.mailbox.retention import HEADROOM
from postroom.application.ports.event_log import EventLogReader
from postroom.application.text import pluralize
from postroom.domain.arguments import check_type
from postroom.domain.errors import InvalidRequest
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.mailbox.topic_decisions import (
    Effect,
    SettingsEffect,
    SettingsPreview,
    base_of,
    effects_on_topics,
)
from postroom.domain.message import MS
from postroom.domain.settings import SettingsChanges, change_settings

_EFFECTS: dict[Effect, tuple[str, str]] = {
    "dead_letters_expired": ("expires now", "expire now"),
    "keys_forgotten": ("is forgotten now", "are forgotten now"),
    "attempts_used": (
        "becomes a dead letter when its delivery fails",
        "become dead letters when their delivery fails",
    ),
    "records_removed": ("is removed by retention", "are removed by retention"),
    "shards_wait": ("must settle before the new number of shards is used",) * 2,
}
"""What happens to one item, and to more."""
_ITEMS: dict[Effect, str] = {
    "dead_letters_expired": "dead letter",
    "keys_forgotten": "idempotency key",
    "records_removed": "log record",
}


class LosesData(InvalidRequest):
    """A change of settings would expire, forget or remove something, and nobody confirmed it."""


class PreviewSettings:
    """A query for the effects of a change of settings."""

    def __init__(self, log: EventLogReader, now: Callable[[], int], state: Callable[[], Mailbox]) -> None:
        """Take the log, and sources of its log time in µs and of the mailbox's state."""
        self._log = log
        self._now = now
        self._state = state

    def __call__(self, changes: SettingsChanges, *, replace: bool = False) -> tuple[SettingsPreview, int]:
        """Return the settings before and after the changes with what these would do to topics at once.

        Arguments: as of `SetMailboxSettings`.
        Returns: the preview, and the position of the last record that retention could remove.
        Raises: InvalidRequest as `SetMailboxSettings`.
        """
        mailbox = self._state()
        base = base_of(mailbox.settings, replace=check_type("replace", replace, bool))
        after = change_settings(base, changes)
        oldest = next(iter(mailbox.messages.values()), None)
        last = mailbox.position if oldest is None else oldest.position - 1
        effects = effects_on_topics(mailbox, after, self._now())
        return SettingsPreview(mailbox.settings.with_searches({}), after.with_searches({}), effects), last

    def count_removed(self, preview: SettingsPreview, last: int) -> SettingsPreview:
        """Return the preview with the number of records that retention would remove, up to `last`.

        Raises: Unavailable when the log can't be read.
        """
        before, after, log, through = preview.before.limits, preview.after.limits, self._log, 0
        if after.history_retention_ms < before.history_retention_ms:
            through = log.position_before(self._now() - after.history_retention_ms * MS)
        limit = after.max_store_bytes
        if limit is not None and limit != before.max_store_bytes:
            size = log.size().commits
            if size > limit:
                through = max(through, log.position_at_size(size - limit + limit // HEADROOM))
        first = log.first_position() if through else None
        count = 0 if first is None else min(through, last) - first + 1
        if count <= 0:
            return preview
        effects = [*preview.effects, SettingsEffect(None, "records_removed", count)]
        return msgspec.structs.replace(preview, effects=effects)


def check_losses(preview: SettingsPreview, what: str) -> None:
    """Check that a change of settings loses nothing.

    Arguments:
        what: what makes the change and can't ask for confirmation, for the error.

    Raises: LosesData.
    """
    if preview.losses:
        losses = "; ".join(map(describe_effect, preview.losses))
        raise LosesData(
            f"{what} would lose data: {losses}. Run postroom apply to confirm it, or change the settings "
            "file."
        )


def describe_effect(effect: SettingsEffect) -> str:
    """Return an effect of a change of settings as a clause."""
    items = pluralize(effect.count, _ITEMS.get(effect.effect, "message"))
    where = "" if effect.topic is None else f" of {effect.topic}"
    return f"{items}{where} {_EFFECTS[effect.effect][effect.count != 1]}"
