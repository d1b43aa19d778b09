"""Port: the settings of a mailbox (ADR 0098)."""

from typing import Protocol

from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.settings import MailboxSettings, SettingsChanges


class Settings(Protocol):
    """The settings of a mailbox: they are stored in its log, and the same whoever owns it.

    Errors are those of `Mailbox`.
    """

    async def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox: limits, default policy, and sections of topics."""

    async def preview_settings(
        self, changes: SettingsChanges, /, *, replace: bool = False
    ) -> SettingsPreview:
        """Return what `set_settings` would do: the settings after it, and what would expire at once."""

    async def set_settings(self, changes: SettingsChanges, /, *, replace: bool = False) -> bool:
        """Change the settings of the mailbox; they apply from now on, and stay whoever owns it.

        The changes are decided by the owner on the settings as they are then, so concurrent ones are not
        lost. `preview_settings` tells what would expire at once.

        Arguments:
            replace: everything that the changes leave out becomes the default.

        Returns: whether that changed anything.
        """
