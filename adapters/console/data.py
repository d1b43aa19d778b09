"""Data sources of the console besides the mailbox of a session."""

from collections.abc import Awaitable, Callable, Sequence

import msgspec

from postroom.application.access.read_audit import ReadAudit
from postroom.application.masking import NO_MASK, Mask
from postroom.application.metrics import Metric
from postroom.application.ports.control_plane import LeaseAdmin, LeaseSummary
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.read_models import ReadModels, SearchQueries
from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope

Decode = Callable[[str, PrismEnvelope], DecodedPayload]
Leases = Callable[[], Awaitable[Sequence[LeaseSummary]]]
"""Returns the leases of a cluster, by mailbox; raises Unavailable if no admin answers."""


class ConsoleData(msgspec.Struct, frozen=True, kw_only=True):
    """Data sources of the console; for one that is None, the pages say how to provide it.

    All of them block, except `measure` and `leases`. Their results are not restricted by a capability: a page
    checks the right first (`Page.require_all`, `Page.check`).

    Arguments:
        store: name of the store, without a password.
        measure: returns the metrics of the mailbox's owner.
        read_models: read models of all mailboxes of the store.
        search_queries: queries of the mailbox; `Session.search_queries` restricts them to a capability.
        log: log of the mailbox.
        audit: reads the audit log of the store.
        audit_log: the audit log itself, to verify it.
        leases: returns the leases of the cluster that the process belongs to.
        control_plane: admin of that cluster.
        decode: decodes a payload by the schemas of the mailbox's namespace; None decodes by the content type
            only.
        mask: headers and fields that are hidden from callers without the right `admin`.
        serves_calls: whether the HTTP interface is served at the same address.
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
