"""Every adapter fits its port, and a log serves the eventsourcing library: type-checked, never run."""

from uuid import UUID

from eventsourcing.application import Application

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.grpc.client import GrpcTransport
from postroom.adapters.http_client import HttpTransport
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.adapters.memory.event_log import MemoryEventLog
from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.adapters.memory.store import MemoryOwnership
from postroom.adapters.postgres.hints import PostgresHints
from postroom.adapters.postgres.lease_store import PostgresLeaseStore, PostgresLeaseTables
from postroom.adapters.postgres.messaging.message_outbox import PostgresMessageOutbox
from postroom.adapters.postgres.messaging.outbox_repository import PostgresOutboxRepository
from postroom.adapters.recorder import LogRecorder
from postroom.adapters.sqlite.event_log import SqliteEventLog
from postroom.adapters.sqlite.lease_store import SqliteLeaseStore, SqliteLeaseTables
from postroom.adapters.sqlite.message_outbox import SqliteMessageOutbox
from postroom.adapters.sqlite.ownership import FileOwnership
from postroom.adapters.system.clock import SystemClock
from postroom.application.access.audit import AuditLog
from postroom.application.access.audit_log import StoredAuditLog
from postroom.application.mailbox_client import MailboxClient, MailboxTransport
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.event_log import Clock, EventLog, Hints
from postroom.application.ports.lease_store import LeaseStore, LeaseTables, Ownership
from postroom.application.ports.outbox import MessageOutbox, OutboxRepository


def adapters_fit_their_ports(
    owned: OwnedMailbox,
    shared: SharedMailbox,
    remote: MailboxClient,
    http: HttpTransport,
    grpc: GrpcTransport,
) -> None:
    logs: list[EventLog] = [MemoryEventLog("acme@one"), SqliteEventLog("store.db", "acme@one")]
    owners: list[Ownership] = [MemoryOwnership(), FileOwnership("store.db")]
    clock: Clock = SystemClock()
    outboxes: list[OutboxRepository] = [PostgresOutboxRepository("postgresql://shop")]
    messages: list[MessageOutbox] = [
        SqliteMessageOutbox("shop.db", "acme@one"),
        PostgresMessageOutbox("postgresql://shop", "acme@one"),
    ]
    hints: list[Hints] = [PostgresHints("postgresql://shop")]
    mailboxes: list[Mailbox] = [owned, shared, remote]
    transports: list[MailboxTransport] = [http, grpc]
    audits: list[AuditLog] = [StoredAuditLog(logs[0], clock)]
    leases: Application[UUID] = Application()
    leases.recorder = LogRecorder(logs[0], clock.wall)
    lease_stores: list[LeaseStore] = [
        MemoryLeaseStore(),
        SqliteLeaseStore("leases.db"),
        PostgresLeaseStore("postgresql://leases"),
    ]
    tables: list[LeaseTables] = [SqliteLeaseTables("leases.db"), PostgresLeaseTables("postgresql://leases")]
    assert lease_stores
    assert tables
    assert owners
    assert outboxes
    assert messages
    assert hints
    assert mailboxes
    assert transports
    assert audits
