"""What the pages of the console read besides the mailbox of their session."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from postroom.application.access.read_audit import ReadAudit
from postroom.application.masking import NO_MASK, Mask
from postroom.application.metrics import Metric
from postroom.application.ports.control_plane import LeaseAdmin, LeaseSummary
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.read_models import ReadModels
from postroom.application.ports.search_queries import SearchQueries
from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

Decode = Callable[[str, PrismEnvelope], DecodedPayload]
Leases = Callable[[], Awaitable[Sequence[LeaseSummary]]]
"""Return the leases of a cluster, by mailbox; raises Unavailable when no admin answers."""


class ConsoleData(msgspec.Struct, frozen=True, kw_only=True):
    """What the console reads of a store; what is None, its pages say how to get.

    The calls of all but `measure` and `leases` block. What they return is not limited to what a capability
    covers: a page checks that first (`Page.require_all`, `Page.check`).

    Arguments:
        store: its name, without a password.
        measure: metrics of the mailbox, of its owner.
        read_models: of all mailboxes of the store.
        search_queries: of the mailbox; `Session.search_queries` limits them to what a token permits.
        log: of the mailbox.
        audit: of the store.
        audit_log: the log of `audit`, to verify it.
        leases: of the cluster that the process belongs to.
        control_plane: of that cluster.
        decode: decodes a payload of a mailbox, by name, by the schemas of its namespace; None goes by the
            content type alone.
        mask: what those without the right `admin` do not see.
        serves_calls: the calls of the HTTP interface are served at the same address.
    """

    store: str = ""
    measure: Callable[[], Awaitable[Sequence[Metric]]] | None = None
    read_models: ReadModels | None = None
    search_queries: SearchQueries | None = None
    log: EventLogReader | None = None
    audit: ReadAudit | None = None
    audit_log: EventLogReader | None = None
    leases: Leases | None = None
    control_plane: LeaseAdmin | None = None
    decode: Decode | None = None
    mask: Mask = NO_MASK
    serves_calls: bool = True
