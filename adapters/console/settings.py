"""Settings of a console, and the sources of its data."""

import re
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from postroom.application.access.audit_log import ReadAudit
from postroom.application.masking import NO_MASK, Mask
from postroom.application.metrics import Metric
from postroom.application.ports.control_plane import LeaseAdmin, LeaseSummary
from postroom.application.ports.event_log import EventLogReader
from postroom.application.ports.failed_work import FailedWork
from postroom.application.ports.read_models import ReadModels, SearchQueries
from postroom.domain.arguments import check_int
from postroom.domain.envelope.content import DecodedPayload
from postroom.domain.envelope.v1.envelope_pb2 import PrismEnvelope
from postroom.domain.errors import InvalidRequest

DEFAULT_PREFIX = "/console"
_PREFIX = re.compile(r"(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+\Z")
_INSTANCE = re.compile(r"[a-z0-9][a-z0-9-]{0,39}\Z")
MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
RESERVED = frozenset(("healthz", "mcp", "metrics", "openapi.json", "readyz", "v1"))
"""First segments of the paths of the HTTP interface."""


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[console]`; times in ms.

    Arguments:
        prefix: path below which the console is served.
        proxy_prefix: prefix that a reverse proxy strips from request paths.
        read_only: refuse all actions, whatever the caller's capability permits.
        idle_timeout_ms: time without a request after which a session ends.
        max_failed_sign_ins: failed attempts to sign in with one capability from one address in a minute.
        mask_headers: names of headers whose values are hidden from callers without the right `admin`.
        mask_payload_fields: JSON pointers to payload fields that are hidden from them; see `Mask`.
        namespaces: YAML file of namespaces (see docs/namespaces.md) whose schemas decode payloads.
        instances: other mailboxes that the console shows, by name; each is a mailbox of the store, the
            address of a store, or a settings file that ends in `.toml`.
    """

    prefix: str = DEFAULT_PREFIX
    proxy_prefix: str = ""
    read_only: bool = False
    idle_timeout_ms: int = 30 * MINUTE_MS
    max_failed_sign_ins: int = 10
    mask_headers: tuple[str, ...] = ()
    mask_payload_fields: tuple[str, ...] = ()
    namespaces: str | None = None
    instances: dict[str, str] = {}

    def validate(self) -> "ConsoleSettings":
        """Return the settings, or raise InvalidRequest."""
        for name, value in (("prefix", self.prefix), ("proxy_prefix", self.proxy_prefix)):
            if not is_prefix(value) and (value or name == "prefix"):
                raise InvalidRequest(
                    f"[console]: {name} is {value!r}; expected a path such as /console, not ending in /."
                )
        if self.prefix.split("/")[1] in RESERVED:
            raise InvalidRequest(
                f"[console]: prefix {self.prefix} is reserved for the HTTP interface; choose another."
            )
        check_int("[console]: idle_timeout_ms", self.idle_timeout_ms, MINUTE_MS, DAY_MS)
        check_int("[console]: max_failed_sign_ins", self.max_failed_sign_ins, 1, 1_000_000)
        for name in self.instances:
            check_instance(name)
        self.mask()
        return self

    def mask(self) -> Mask:
        """Return the mask for callers without the right `admin`, or raise InvalidRequest."""
        return Mask(self.mask_headers, self.mask_payload_fields).validate()


def check_instance(name: str) -> str:
    """Return the name of an instance, which is part of paths and cookies, or raise InvalidRequest."""
    if not _INSTANCE.match(name) or name in ("refresh", "static"):
        raise InvalidRequest(
            f"The name of an instance is {name[:80]!r}; expected up to 40 characters of a-z, 0-9 and -, "
            "beginning with a letter or digit, and neither refresh nor static."
        )
    return name


def is_prefix(text: str) -> bool:
    """Return whether a text is a valid prefix of links."""
    return len(text) <= 255 and _PREFIX.match(text) is not None


Decode = Callable[[str, PrismEnvelope], DecodedPayload]
Leases = Callable[[], Awaitable[Sequence[LeaseSummary]]]
"""Returns the leases of a cluster, by mailbox; raises Unavailable if no admin answers."""


class PartState(NamedTuple):
    """State of a part of a process.

    Arguments:
        name: such as `worker shop.tasks:worker`.
        failures: number of failures since the process began.
        error: of its last failure; empty if there was none.
        failed_at: when it failed last, RFC 3339; empty if it did not.
    """

    name: str
    is_running: bool
    failures: int = 0
    error: str = ""
    failed_at: str = ""


class ConsoleData(msgspec.Struct, frozen=True, kw_only=True):
    """Data sources of the console; where a source is None, the pages say how to provide it.

    All of them block, except `measure`, `leases` and `failed_work`. Their results are not restricted by a
    capability: a page checks the right first (`Page.require_all`, `Page.check`).

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
        parts: returns the parts of this process, if it starts them again when they fail.
        failed_work: failures of the outbox, inbox and ingestions that the settings of this process name.
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
    parts: Callable[[], Sequence[PartState]] | None = None
    failed_work: Sequence[FailedWork] = ()
