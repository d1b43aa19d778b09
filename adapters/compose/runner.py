"""Wiring of a runner: its store, the server of its mailboxes, and the control plane (RFC-049)."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from postroom.adapters.compose import OwnedMailbox, OwnerSettings, own_mailbox
from postroom.adapters.compose.control_plane import advertised_address
from postroom.adapters.compose.serve import SurfaceProtection, make_service, unrestricted
from postroom.adapters.compose.store import MEMORY, Store, open_store
from postroom.adapters.sockets.address import check_access
from postroom.adapters.system.clock import SystemClock
from postroom.application.cluster.leased_mailbox import RunnerIdentity
from postroom.application.cluster.runner import Runner, ServedMailboxes
from postroom.application.extras import explain_missing_extra
from postroom.application.mailbox.owner_tasks import LeaseTerm
from postroom.application.metrics import Metric, Monitor, label
from postroom.application.operations.mailbox import Mailbox
from postroom.application.ports.control_plane import HostedMailbox, LeaseAdmin, MailboxHost, MailboxReport
from postroom.application.queries.preview_settings import check_losses
from postroom.application.service import OpenSession, Search, Service, SurfaceMetrics
from postroom.application.telemetry import logger, summarize
from postroom.application.threads import cancel_and_wait, wait_at_most
from postroom.domain.arguments import check_items
from postroom.domain.errors import InvalidRequest, NotFound, PostroomError
from postroom.domain.names import check_mailbox, check_member
from postroom.domain.settings import SettingsChanges, changed_settings

if TYPE_CHECKING:  # grpcio and the packages of ingestion are extras
    from postroom.adapters.compose.ingest import Ingester, Namespace
    from postroom.adapters.grpc.handlers import MailboxHandlers

__all__ = ["RunnerSettings", "StoreHost", "open_runner"]

RELEASE_WAIT_MS = 100
"""How long a former owner has to release a mailbox before it is evicted; its lease has ended by then."""
SIZE_SECONDS = 30.0
"""How often the size of a log is measured."""
INGEST_PAUSE_SECONDS = 5.0
INGEST_CLOSE_SECONDS = 1.0
QUERIES = (
    "backlog",
    "describe_topic",
    "explain",
    "get",
    "get_topic_policy",
    "list_consumers",
    "list_dead_letters",
    "list_topics",
    "list_workers",
    "peek",
    "query",
)
"""The calls that count as queries in heartbeats."""
Access = Callable[[Mailbox, Search], OpenSession]


class RunnerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Identity of a runner, and how it opens its mailboxes.

    Arguments:
        runner, proxy: ids of the runner and of its proxy.
        mailboxes: mailboxes that it always tries to own.
        listen: `host:port` or `unix:path` of its gRPC server.
        address: address at which the other processes reach it; None takes `listen`.
        namespaces: configuration of the ingestion of mailboxes, by mailbox.
    """

    runner: str
    proxy: str
    mailboxes: Sequence[str]
    listen: str
    address: str | None = None
    owner: OwnerSettings = OwnerSettings()
    protection: SurfaceProtection = SurfaceProtection()
    namespaces: "Mapping[str, Namespace]" = {}
    cap_cache_ttl_ms: int | None = None

    def check(self) -> "RunnerSettings":
        """Return the settings, or raise InvalidRequest."""
        check_member("The runner id", self.runner)
        check_member("The proxy id", self.proxy)
        for mailbox in check_items("mailboxes", self.mailboxes):
            check_mailbox(mailbox)
        return msgspec.structs.replace(
            self, owner=self.owner._replace(owner=self.owner.owner or f"runner {self.runner}").check()
        )


class StoreHost(MailboxHost):
    """`MailboxHost` over a store, for the mailboxes that a server serves.

    Arguments:
        store: its address.
        access: decides what the bearer of a token may do.
    """

    def __init__(self, store: str, settings: RunnerSettings, access: Access) -> None:
        if store == MEMORY:
            raise InvalidRequest(
                "A runner's mailboxes move to other runners, which can't read a store in memory; name a file "
                "or a postgresql:// URL."
            )
        self.served = ServedMailboxes()
        self._address = store
        self._store = open_store(store)
        self._settings = settings
        self._access = access
        self._open: dict[str, _ServedMailbox] = {}

    async def log_epoch(self, mailbox: str) -> int:
        return await asyncio.to_thread(_log_epoch, self._store, mailbox)

    @asynccontextmanager
    async def open(
        self, mailbox: str, epoch: int, may_append: Callable[[], bool]
    ) -> "AsyncIterator[_ServedMailbox]":
        namespace = self._settings.namespaces.get(mailbox)
        owner = self._settings.owner
        if namespace is not None:
            limits = {**owner.settings.limits, **namespace.limits}
            settings = msgspec.structs.replace(owner.settings, limits=limits)
            owner = owner._replace(mode="archive", settings=settings)
        lease = LeaseTerm(epoch, may_append)
        async with own_mailbox(self._store, mailbox, owner, RELEASE_WAIT_MS, lease) as postroom:
            service = make_service(
                self._address,
                postroom,
                access=self._access,
                measure=postroom.measure,
                cap_cache_ttl_ms=self._settings.cap_cache_ttl_ms,
            )
            hosted = self._open[mailbox] = _ServedMailbox(postroom, service)
            remove = self.served.add(service)
            ingestion = None if namespace is None else _Ingestion(namespace, postroom)
            try:
                yield hosted
            finally:
                remove()
                if self._open.get(mailbox) is hosted:
                    del self._open[mailbox]
                if ingestion is not None:
                    await ingestion.close()

    async def reload(self, settings: SettingsChanges) -> None:
        """Open mailboxes with these settings from now on, and apply changed settings to open mailboxes.

        A mailbox that refuses them, or would lose something by them, stays open with its former settings.
        """
        changes = changed_settings(self._settings.owner.settings, settings)
        owner = self._settings.owner._replace(settings=settings)
        self._settings = msgspec.structs.replace(self._settings, owner=owner)
        for hosted in list(self._open.values()):
            try:
                check_losses(await hosted.postroom.preview_settings(changes), "A reload")
                await hosted.postroom.set_settings(changes)
            except PostroomError as error:
                logger().error("runner.settings_refused", mailbox=hosted.postroom.name, error=str(error))

    async def collect(self) -> list[Metric]:
        """Return the metrics of all mailboxes that are open, with the label `mailbox`."""
        opened = sorted(self._open.items())
        return label("mailbox", {name: await hosted.service.metrics.collect() for name, hosted in opened})


class _ServedMailbox(HostedMailbox):
    """A mailbox that is open and served; see `HostedMailbox`."""

    def __init__(self, postroom: OwnedMailbox, service: Service) -> None:
        self.postroom = postroom
        self.service = service
        self._size = 0
        self._measured_at = -SIZE_SECONDS

    async def wait_until_lost(self) -> None:
        await self.postroom.engine.wait_until_lost()

    async def report(self) -> MailboxReport:
        now = time.monotonic()
        if now - self._measured_at >= SIZE_SECONDS:
            self._measured_at = now
            self._size = (await asyncio.to_thread(self.postroom.engine.log.size)).commits
        return MailboxReport(
            self.postroom.engine.mailbox.position,
            self.service.metrics.count_answers(QUERIES),
            self._size,
            "healthy" if self.service.writes.takes_writes else "degraded",
        )


@asynccontextmanager
async def open_runner(
    store: str, settings: RunnerSettings, access: Access, admin: LeaseAdmin
) -> "AsyncIterator[OpenRunner]":
    """Serve the mailboxes of a runner over gRPC for as long as the context lasts; `OpenRunner.run` owns them.

    Arguments:
        access: decides what the bearer of a token may do; `unrestricted` lets every caller do everything.
        admin: the control plane.

    Raises: InvalidRequest for an address that is not served, Unavailable when it can't be bound.
    """
    settings = settings.check()
    target = settings.protection.resolve(settings.listen)
    check_access(target, is_dev=access is unrestricted)
    host = StoreHost(store, settings, access)
    with explain_missing_extra("cluster"):
        from postroom.adapters.grpc.handlers import MailboxHandlers
        from postroom.adapters.grpc.server import serve_handlers

    unserved = SurfaceMetrics()
    handlers = MailboxHandlers(host.served.find, unserved)
    tls, limits = settings.protection.tls_at(target), settings.protection.limits
    async with serve_handlers(target, [handlers], tls, limits) as url:
        address = advertised_address(url, target, settings.address)
        identity = RunnerIdentity(settings.runner, settings.proxy, address)
        runner = Runner(identity, settings.mailboxes, admin, host, SystemClock())
        yield OpenRunner(runner, host, handlers, url)


class OpenRunner(NamedTuple):
    """A runner whose server listens.

    Arguments:
        handlers: of its server, for a proxy in the same process.
        url: of its server.
    """

    runner: Runner
    host: StoreHost
    handlers: "MailboxHandlers"
    url: str

    def monitor(self) -> Monitor:
        """Return the monitor of the runner: its leases, and the mailboxes that it has open."""

        async def collect() -> list[Metric]:
            return [*self.runner.collect(), *await self.host.collect()]

        async def find_missing() -> list[str]:
            return self.runner.find_missing()

        return Monitor(collect, find_missing)


def _log_epoch(store: Store, mailbox: str) -> int:
    try:
        log = store.existing_log(mailbox)
    except NotFound:
        return 0
    try:
        head = log.head()
        return 0 if head is None else head.epoch
    finally:
        log.close()


class _Ingestion:
    """Ingestion of a namespace into its mailbox, through failures of the source."""

    def __init__(self, namespace: "Namespace", postroom: OwnedMailbox) -> None:
        self._namespace = namespace
        self._postroom = postroom
        self._ingester: Ingester | None = None
        self._ending = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"ingestion of {namespace.name}")

    async def close(self) -> None:
        """Store the batches in progress, and end."""
        self._ending.set()
        if self._ingester is not None:
            self._ingester.stop()
        await wait_at_most(INGEST_CLOSE_SECONDS, asyncio.wait([self._task]))
        await cancel_and_wait(self._task, seconds=INGEST_CLOSE_SECONDS)

    async def _run(self) -> None:
        from postroom.adapters.compose.ingest import open_ingester

        while not self._ending.is_set():
            try:
                async with open_ingester(self._namespace, self._postroom) as self._ingester:
                    await self._ingester.run()
            except Exception as error:  # the mailbox is served even if nothing can be ingested
                logger().retry("runner.ingest_failed", namespace=self._namespace.name, error=summarize(error))
            await wait_at_most(INGEST_PAUSE_SECONDS, self._ending.wait())
