"""`PreviewSettings`: what a change of the mailbox's settings would do to what it holds."""

from collections.abc import Callable

import msgspec

from postroom.application.mailbox.retention import HEADROOM
from postroom.application.ports.event_log import EventLogReader
from postroom.domain.arguments import check_type
from postroom.domain.mailbox.settings_effects import SettingsEffect, SettingsPreview, effects_on_topics
from postroom.domain.mailbox.state import Mailbox
from postroom.domain.message import MS
from postroom.domain.settings import MailboxSettings, SettingsChanges, change_settings


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
        base = MailboxSettings() if check_type("replace", replace, bool) else mailbox.settings
        after = change_settings(base, changes)
        oldest = next(iter(mailbox.messages.values()), None)
        last = mailbox.position if oldest is None else oldest.position - 1
        return SettingsPreview(mailbox.settings, after, effects_on_topics(mailbox, after, self._now())), last

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
