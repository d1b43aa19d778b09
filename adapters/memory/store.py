"""A store in memory, which is lost at the end of the process."""

from typing import Any, NoReturn

from postroom.adapters.memory.amnesia_log import AmnesiaEventLog
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.memory.ownership import MemoryOwnership
from postroom.application.ports.outbox import MessageCount
from postroom.domain.errors import InvalidRequest


class MemoryStore:
    """A store in memory, without read models; see `Store`."""

    where = "memory:"

    def event_log(self, mailbox: str, **_: Any) -> MemoryEventLog:
        """Return a new, empty log; see `Store.event_log`."""
        return MemoryEventLog(mailbox)

    def message_outbox(self, _mailbox: str) -> None:
        """Return None: no transaction can record messages here; see `Store.message_outbox`."""

    def has_message_outbox(self) -> bool:
        """Return False; see `Store.has_message_outbox`."""
        return False

    def count_messages(self) -> list[MessageCount]:
        """Return nothing: no transaction can record messages here; see `Store.count_messages`."""
        return []

    def ownership(self) -> MemoryOwnership:
        """Return the ownership of mailboxes; see `Store.ownership`."""
        return MemoryOwnership()

    identity = where

    def socket_path(self, mailbox: str) -> None:
        """Return None: other processes can't reach the store; see `Store.socket_path`."""

    def existing_log(self, mailbox: str) -> NoReturn:
        """Raise InvalidRequest: other processes can't read the store; see `Store.existing_log`."""
        raise InvalidRequest(
            "A store in memory can only be used by the process that opened it; name a file or a "
            "postgresql:// URL."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: self.existing_log("")


class AmnesiaStore(MemoryStore):
    """A store in memory whose logs forget settled messages."""

    def event_log(self, mailbox: str, **_: Any) -> AmnesiaEventLog:
        """Return a new, empty log; see `Store.event_log`."""
        return AmnesiaEventLog(mailbox)
