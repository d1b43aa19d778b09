"""Port: the calls of a mailbox's server."""

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from postroom.application.messages import MessageDelivery, NewMessage, Sent
from postroom.application.query_results import (
    Backlog,
    DeadLetter,
    Explanation,
    MessageDetail,
    Moment,
    PeekedMessage,
)
from postroom.application.redrive_results import Outcome, RedriveMessages, RedrivePreview, RedriveReport
from postroom.domain.errors import Rejected
from postroom.domain.mailbox.commands import Receive
from postroom.domain.mailbox.counts import TopicSummary
from postroom.domain.mailbox.settings_effects import SettingsPreview
from postroom.domain.message import Receipt
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import JobAction, RedriveSpec
from postroom.domain.search import EventFilter, SearchPage
from postroom.domain.settings import MailboxSettings, PolicyChanges, SettingsChanges


class MailboxTransport(Protocol):
    """One attempt of each call of `Mailbox`, with arguments that are valid.

    Every call raises the error that the server reported, or Unavailable with a retry time when the server
    can't be reached. A call that is cancelled may have taken effect.
    """

    @property
    def where(self) -> str:
        """Return the server's address, for errors."""

    @property
    def max_batch_bytes(self) -> int:
        """Return the size of the payloads and attributes that one batch may have."""

    async def get_name(self) -> str:
        """Return the name of the mailbox that the server serves."""

    async def send(self, message: NewMessage) -> Sent:
        """Send a message."""

    async def send_batch(self, messages: Sequence[NewMessage]) -> list[Sent | Rejected]:
        """Send messages; return an answer for each, in their order."""

    async def receive(self, command: Receive, wait_ms: int) -> list[MessageDelivery]:
        """Receive messages; wait up to `wait_ms` for one."""

    def stream(self, command: Receive, heartbeat_ms: int) -> AsyncGenerator[list[MessageDelivery], None]:
        """Yield messages as they come, at most `command.max_messages` of them unsettled at a time.

        A batch comes at least every `heartbeat_ms`, if need be an empty one. The server makes ready what is
        unsettled when the generator is closed. It never ends by itself.

        Raises: as every call, when the server refuses or ends the stream.
        """

    async def ack(self, receipts: Sequence[Receipt]) -> list[Rejected | None]:
        """Settle deliveries."""

    async def nack(
        self, receipts: Sequence[Receipt], reason: str | None, delay_ms: int | None
    ) -> list[Rejected | None]:
        """Fail deliveries."""

    async def extend(self, receipts: Sequence[Receipt], visibility_ms: int) -> list[Rejected | None]:
        """Extend deliveries."""

    async def redrive(
        self,
        topic: str,
        limit: int,
        reason: str | None,
        message_ids: Sequence[str] | None,
    ) -> int:
        """Redrive dead letters; return how many."""

    async def purge(self, topic: str, dead: bool, ready: bool) -> int:
        """Remove messages of a topic; return how many."""

    async def set_topic_policy(self, topic: str, policy: PolicyChanges) -> None:
        """Set fields of the policy of a topic."""

    async def get_settings(self) -> MailboxSettings:
        """Return the settings of the mailbox."""

    async def preview_settings(self, changes: SettingsChanges, replace: bool) -> SettingsPreview:
        """Return what a change of settings would do."""

    async def set_settings(self, changes: SettingsChanges, replace: bool) -> bool:
        """Change settings; return whether that changed anything."""

    async def pause_topic(self, topic: str) -> None:
        """Pause a topic."""

    async def resume_topic(self, topic: str) -> None:
        """Resume a topic."""

    async def delete_old_events(self, older_than: int) -> int:
        """Remove settled records written before a log time (µs); return how many."""

    async def preview_redrive(self, spec: RedriveSpec) -> RedrivePreview:
        """Return the dead letters that a redrive job would select."""

    async def start_redrive(self, spec: RedriveSpec, job_id: str) -> RedriveReport:
        """Start a redrive job."""

    async def list_redrives(self) -> list[RedriveReport]:
        """Return the redrive jobs."""

    async def get_redrive(self, job_id: str) -> RedriveReport:
        """Return a redrive job."""

    async def list_redrive_messages(
        self, job_id: str, outcome: Outcome | None, cursor: str | None, limit: int
    ) -> RedriveMessages:
        """Return a page of the messages of a redrive job."""

    async def change_redrive(self, job_id: str, action: JobAction) -> RedriveReport:
        """Pause, resume, cancel or undo a redrive job."""

    async def get_message(self, id_: str) -> MessageDetail:
        """Return a message with its history."""

    async def explain_message(self, id_: str) -> Explanation:
        """Return the explanation of a message."""

    async def get_backlog(self, topic: str | None, at: Moment | None) -> Backlog:
        """Return the unsettled messages by topic and shard."""

    async def list_dead_letters(
        self,
        topic: str | None,
        reason: str | None,
        limit: int,
        cursor: int,
        at: Moment | None,
    ) -> list[DeadLetter]:
        """Return a page of dead letters."""

    async def get_topic_policy(self, topic: str) -> TopicPolicy | None:
        """Return the policy of a topic; None from a server that has none of its own."""

    async def list_topics(self) -> list[TopicSummary]:
        """Return the topics."""

    async def peek_messages(self, topic: str, limit: int) -> list[PeekedMessage]:
        """Return ready messages."""

    async def search_messages(self, filter_: EventFilter) -> SearchPage:
        """Return a page of the messages that match."""
