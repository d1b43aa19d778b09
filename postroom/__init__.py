"""The public API of Postroom: what `from postroom import ...` gives.

Importing it loads nothing else: the module of a name is imported when the name is first used (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from postroom.adapters.compose import OwnedMailbox, list_mailboxes, open_mailbox
    from postroom.adapters.compose.brokers import MailboxTarget, open_streams
    from postroom.adapters.compose.connect import ClientTls, Connection, connect
    from postroom.adapters.compose.export import export_messages
    from postroom.adapters.compose.inbox import open_dead_letters, open_inbox, open_worker
    from postroom.adapters.compose.ingest import (
        KafkaSource,
        Namespace,
        NatsSource,
        RabbitmqSource,
        RedisSource,
        find_namespace,
        load_namespaces,
        open_ingester,
    )
    from postroom.adapters.compose.maintenance import migrate_messaging, migrate_store
    from postroom.adapters.compose.outbox import open_capture, open_outbox, open_relay
    from postroom.adapters.compose.projections import (
        open_follower,
        rebuild_projections,
        roll_back_projections,
        verify_projections,
    )
    from postroom.adapters.compose.queries import Projections, Reader, read_mailbox, read_projections
    from postroom.adapters.http.signature import verify_signature
    from postroom.adapters.kafka.settings import KafkaSettings
    from postroom.adapters.nats.definitions import ConsumerDefinition, StreamDefinition
    from postroom.adapters.nats.settings import NatsSettings
    from postroom.adapters.postgres.capture.settings import CaptureColumns, CaptureSettings
    from postroom.adapters.postgres.messaging.middleware import (
        acknowledge,
        current_transaction,
        inbox,
        outbox,
        pipeline,
        transaction,
    )
    from postroom.adapters.postgres.messaging.outbox import AsyncOutbox, Outbox
    from postroom.adapters.postgres.messaging.settings import MessagingSettings, Tables
    from postroom.adapters.rabbitmq.settings import RabbitmqSettings
    from postroom.adapters.sentry import sentry
    from postroom.adapters.sql.mailbox_outbox import AsyncMailboxOutbox, MailboxOutbox
    from postroom.adapters.sync_mailbox import SyncMailbox, SyncMessageStream, SyncReceivedMessage
    from postroom.application.erasure.erase_subject import ErasureSettings
    from postroom.application.extras import MissingExtra
    from postroom.application.inbox.delivery import EventHandlers
    from postroom.application.inbox.metrics import InboxSettings
    from postroom.application.mailbox.administer import PurgeTopic, RedriveDeadLetters, SetTopicPolicy
    from postroom.application.mailbox.receive import ReceiveMessages
    from postroom.application.mailbox.retention import DeleteOldEvents
    from postroom.application.mailbox.send import SendBatch, SendEnvelopes, SendMessage
    from postroom.application.mailbox.settle import AckMessages, ExtendVisibility, NackMessages
    from postroom.application.message_stream import MessageStream
    from postroom.application.messages import MessageResult, NewMessage, Sent, read_receipt, write_receipt
    from postroom.application.operations.mailbox import Mailbox
    from postroom.application.outbox.new_event import NewEvent
    from postroom.application.outbox.relay import OutboxSettings
    from postroom.application.page import Page
    from postroom.application.ports.inbox import HandlerRequest
    from postroom.application.ports.source import SourceMessage
    from postroom.application.queries.simulate_policy import Simulation
    from postroom.application.queries.verify import Verification
    from postroom.application.query_results import (
        Backlog,
        DeadLetter,
        Explanation,
        HistoryEntry,
        MessageDetail,
        MessageOutcome,
        PeekedMessage,
        RedrivePreview,
    )
    from postroom.application.received_messages import ReceivedMessage
    from postroom.application.reports import (
        DeletionReport,
        RedriveMessage,
        RedriveReport,
        RewindReport,
        ScheduleReport,
        SubscriptionReport,
    )
    from postroom.application.workers.retry import Reject, Retry, RetryLater, exponential
    from postroom.application.workers.schedules import every
    from postroom.application.workers.worker import Worker, WorkerCounts
    from postroom.domain.envelope.validation import EnvelopeProblem, ValidationMode
    from postroom.domain.errors import (
        BrokenLog,
        BrokenProjection,
        DuplicateInboxMessage,
        Fenced,
        Forbidden,
        FrameTooLarge,
        FutureEvent,
        IdempotencyConflict,
        ImplausibleClock,
        IntegrityFailure,
        InternalError,
        InvalidOutboxEvent,
        InvalidRequest,
        InvalidTimestamp,
        MailboxClosed,
        MailboxOwned,
        NotFound,
        PoisonMessage,
        PostroomError,
        Rejected,
        Saturated,
        SettingsConflict,
        StaleReceipt,
        Unauthenticated,
        Unavailable,
    )
    from postroom.domain.message import Receipt
    from postroom.domain.policy import Changes, MailboxLimits, TopicPolicy
    from postroom.domain.redrive.spec import RedriveSpec
    from postroom.domain.schedule import ScheduleSpec
    from postroom.domain.search import EventFilter, FoundMessage
    from postroom.domain.settings import MailboxSettings, SettingsChanges
    from postroom.domain.subject import SubjectPolicy
    from postroom.domain.subscription import SubscriptionFilter
    from postroom.projections.projection import Column, EventProjection, MessageProjection
    from postroom.projections.reports.report import Chart, Report

__all__ = [
    "AckMessages",
    "AsyncMailboxOutbox",
    "AsyncOutbox",
    "Backlog",
    "BrokenLog",
    "BrokenProjection",
    "CaptureColumns",
    "CaptureSettings",
    "Changes",
    "Chart",
    "ClientTls",
    "Column",
    "Connection",
    "ConsumerDefinition",
    "DeadLetter",
    "DeleteOldEvents",
    "DeletionReport",
    "DuplicateInboxMessage",
    "EnvelopeProblem",
    "ErasureSettings",
    "EventFilter",
    "EventHandlers",
    "EventProjection",
    "Explanation",
    "ExtendVisibility",
    "Fenced",
    "Forbidden",
    "FoundMessage",
    "FrameTooLarge",
    "FutureEvent",
    "HandlerRequest",
    "HistoryEntry",
    "IdempotencyConflict",
    "ImplausibleClock",
    "InboxSettings",
    "IntegrityFailure",
    "InternalError",
    "InvalidOutboxEvent",
    "InvalidRequest",
    "InvalidTimestamp",
    "KafkaSettings",
    "KafkaSource",
    "Mailbox",
    "MailboxClosed",
    "MailboxLimits",
    "MailboxOutbox",
    "MailboxOwned",
    "MailboxSettings",
    "MailboxTarget",
    "MessageDetail",
    "MessageOutcome",
    "MessageProjection",
    "MessageResult",
    "MessageStream",
    "MessagingSettings",
    "MissingExtra",
    "NackMessages",
    "Namespace",
    "NatsSettings",
    "NatsSource",
    "NewEvent",
    "NewMessage",
    "NotFound",
    "Outbox",
    "OutboxSettings",
    "OwnedMailbox",
    "Page",
    "PeekedMessage",
    "PoisonMessage",
    "PostroomError",
    "Projections",
    "PurgeTopic",
    "RabbitmqSettings",
    "RabbitmqSource",
    "Reader",
    "Receipt",
    "ReceiveMessages",
    "ReceivedMessage",
    "RedisSource",
    "RedriveDeadLetters",
    "RedriveMessage",
    "RedrivePreview",
    "RedriveReport",
    "RedriveSpec",
    "Reject",
    "Rejected",
    "Report",
    "Retry",
    "RetryLater",
    "RewindReport",
    "Saturated",
    "ScheduleReport",
    "ScheduleSpec",
    "SendBatch",
    "SendEnvelopes",
    "SendMessage",
    "Sent",
    "SetTopicPolicy",
    "SettingsChanges",
    "SettingsConflict",
    "Simulation",
    "SourceMessage",
    "StaleReceipt",
    "StreamDefinition",
    "SubjectPolicy",
    "SubscriptionFilter",
    "SubscriptionReport",
    "SyncMailbox",
    "SyncMessageStream",
    "SyncReceivedMessage",
    "Tables",
    "TopicPolicy",
    "Unauthenticated",
    "Unavailable",
    "ValidationMode",
    "Verification",
    "Worker",
    "WorkerCounts",
    "acknowledge",
    "connect",
    "current_transaction",
    "every",
    "exponential",
    "export_messages",
    "find_namespace",
    "inbox",
    "list_mailboxes",
    "load_namespaces",
    "migrate_messaging",
    "migrate_store",
    "open_capture",
    "open_dead_letters",
    "open_follower",
    "open_inbox",
    "open_ingester",
    "open_mailbox",
    "open_outbox",
    "open_relay",
    "open_streams",
    "open_worker",
    "outbox",
    "pipeline",
    "read_mailbox",
    "read_projections",
    "read_receipt",
    "rebuild_projections",
    "roll_back_projections",
    "sentry",
    "transaction",
    "verify_projections",
    "verify_signature",
    "write_receipt",
]

# The module of each public name, for those who import it at run time.
_NAMES = {
    "adapters.compose": "OwnedMailbox list_mailboxes open_mailbox",
    "adapters.compose.brokers": "MailboxTarget open_streams",
    "adapters.compose.connect": "ClientTls Connection connect",
    "adapters.compose.export": "export_messages",
    "adapters.compose.inbox": "open_dead_letters open_inbox open_worker",
    "adapters.compose.ingest": (
        "KafkaSource Namespace NatsSource RabbitmqSource RedisSource find_namespace load_namespaces "
        "open_ingester"
    ),
    "adapters.compose.maintenance": "migrate_messaging migrate_store",
    "adapters.compose.outbox": "open_capture open_outbox open_relay",
    "adapters.compose.projections": (
        "open_follower rebuild_projections roll_back_projections verify_projections"
    ),
    "adapters.compose.queries": "Projections Reader read_mailbox read_projections",
    "adapters.http.signature": "verify_signature",
    "adapters.kafka.settings": "KafkaSettings",
    "adapters.nats.definitions": "ConsumerDefinition StreamDefinition",
    "adapters.nats.settings": "NatsSettings",
    "adapters.postgres.capture.settings": "CaptureColumns CaptureSettings",
    "adapters.postgres.messaging.middleware": (
        "acknowledge current_transaction inbox outbox pipeline transaction"
    ),
    "adapters.postgres.messaging.outbox": "AsyncOutbox Outbox",
    "adapters.postgres.messaging.settings": "MessagingSettings Tables",
    "adapters.rabbitmq.settings": "RabbitmqSettings",
    "adapters.sentry": "sentry",
    "adapters.sql.mailbox_outbox": "AsyncMailboxOutbox MailboxOutbox",
    "adapters.sync_mailbox": "SyncMailbox SyncMessageStream SyncReceivedMessage",
    "application.erasure.erase_subject": "ErasureSettings",
    "application.extras": "MissingExtra",
    "application.inbox.delivery": "EventHandlers",
    "application.inbox.metrics": "InboxSettings",
    "application.mailbox.administer": "PurgeTopic RedriveDeadLetters SetTopicPolicy",
    "application.mailbox.receive": "ReceiveMessages",
    "application.mailbox.retention": "DeleteOldEvents",
    "application.mailbox.send": "SendBatch SendEnvelopes SendMessage",
    "application.mailbox.settle": "AckMessages ExtendVisibility NackMessages",
    "application.message_stream": "MessageStream",
    "application.messages": "MessageResult NewMessage Sent read_receipt write_receipt",
    "application.received_messages": "ReceivedMessage",
    "application.operations.mailbox": "Mailbox",
    "application.outbox.new_event": "NewEvent",
    "application.outbox.relay": "OutboxSettings",
    "application.page": "Page",
    "application.ports.inbox": "HandlerRequest",
    "application.ports.source": "SourceMessage",
    "application.queries.simulate_policy": "Simulation",
    "application.queries.verify": "Verification",
    "application.query_results": (
        "Backlog DeadLetter Explanation HistoryEntry MessageDetail MessageOutcome PeekedMessage "
        "RedrivePreview"
    ),
    "application.reports": (
        "DeletionReport RedriveMessage RedriveReport RewindReport ScheduleReport SubscriptionReport"
    ),
    "application.workers.retry": "Reject Retry RetryLater exponential",
    "application.workers.schedules": "every",
    "application.workers.worker": "Worker WorkerCounts",
    "domain.envelope.validation": "EnvelopeProblem ValidationMode",
    "domain.errors": (
        "BrokenLog BrokenProjection DuplicateInboxMessage Fenced Forbidden FrameTooLarge FutureEvent "
        "IdempotencyConflict ImplausibleClock IntegrityFailure InternalError InvalidOutboxEvent "
        "InvalidRequest InvalidTimestamp MailboxClosed MailboxOwned NotFound PoisonMessage PostroomError "
        "Rejected Saturated SettingsConflict StaleReceipt Unauthenticated Unavailable"
    ),
    "domain.message": "Receipt",
    "domain.policy": "Changes MailboxLimits TopicPolicy",
    "domain.redrive.spec": "RedriveSpec",
    "domain.search": "EventFilter FoundMessage",
    "domain.settings": "MailboxSettings SettingsChanges",
    "domain.subject": "SubjectPolicy",
    "domain.schedule": "ScheduleSpec",
    "domain.subscription": "SubscriptionFilter",
    "projections.projection": "Column EventProjection MessageProjection",
    "projections.reports.report": "Chart Report",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

if not TYPE_CHECKING:  # a type checker would believe that any name exists

    def __getattr__(name: str) -> Any:
        """Import a public name from its module."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from postroom.application.extras import explain_missing_extra

        with explain_missing_extra():
            value = getattr(import_module(f"postroom.{_MODULES[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
