"""Port: an event log in memory that forgets what is settled, within a bound."""

from collections.abc import Collection
from typing import Protocol

from postroom.application.ports.event_log import EventLog


class VolatileLog(EventLog, Protocol):
    """The log of one mailbox in memory, without the content of settled messages (svc-mailbox I-9)."""

    @property
    def used_bytes(self) -> int:
        """Return about how much memory events and snapshots take, in bytes."""

    def compact(self, through: int, unsettled: Collection[bytes]) -> int:
        """Forget the events before a snapshot, as far as no unsettled message needs them.

        Of an unsettled message, the send and the latest delivery remain. Of one that settled since the last
        compaction, all remains but its content, so that a repeated ack or send is recognised.

        Arguments:
            through: position of the snapshot; its commit and later ones remain.
            unsettled: streams of the messages that were unsettled there.

        Returns: how many events were forgotten.
        """
