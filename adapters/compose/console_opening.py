"""Wiring of the console of one mailbox: its data sources and its application."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
)
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from postroom.adapters.compose import OwnedMailbox, shown_store
from postroom.adapters.compose.access import read_audit_log
from postroom.adapters.compose.export import StoreSearchQueries
from postroom.adapters.compose.failed_work import ingest_failures
from postroom.adapters.compose.store import MEMORY, open_store
from postroom.adapters.console.samples import Samples
from postroom.adapters.console.sessions import OneTimeCode
from postroom.adapters.console.settings import ConsoleData, ConsoleSettings, Decode, PartState
from postroom.adapters.local.mailbox import SharedMailbox
from postroom.application.extras import explain_missing_extra
from postroom.application.metrics import Measure
from postroom.application.ports.control_plane import LeaseAdmin
from postroom.application.ports.failed_work import FailedWork
from postroom.application.service import Search, Service
from postroom.application.threads import background_task
from postroom.domain.errors import PostroomError

if TYPE_CHECKING:  # Starlette is an extra
    from starlette.applications import Starlette

T = TypeVar("T")

OpenControlPlane = Callable[[], AbstractAsyncContextManager[LeaseAdmin | None]]
"""Opens the control plane of a cluster for the duration of the context; yields None without a cluster."""
FindFailedWork = Callable[[str], Sequence[FailedWork]]
"""Returns the failures that may be retried in the console of a mailbox."""


class Frame(NamedTuple):
    """What all consoles of a process have in common; see `console_mount`."""

    settings: ConsoleSettings
    trusts_proxy: bool
    code: OneTimeCode | None
    is_secure: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of `Shell`."""
        return {"is_secure": self.is_secure, "trusts_proxy": self.trusts_proxy, "code": self.code}


class Opener(NamedTuple):
    """Opens the console of a service; see `console_mount`."""

    store: str
    settings: ConsoleSettings
    open_control_plane: OpenControlPlane | None
    find_failed_work: FindFailedWork | None
    decode: Decode | None
    parts: Callable[[], Sequence[PartState]] | None = None
    serves_calls: bool = True

    async def open(
        self, service: Service, samples: Samples, opened: AsyncExitStack, frame: Frame, **options: Any
    ) -> "Starlette":
        """Return the application, whose sources are open until `opened` is closed.

        Arguments:
            options: options of `make_console` that the frame lacks.
        """
        make_console = await asyncio.to_thread(import_app)
        cluster = None
        if self.open_control_plane is not None:
            cluster = await opened.enter_async_context(self.open_control_plane())
        mailbox, file = service.mailbox, self.settings.namespaces
        work = [] if self.find_failed_work is None else [*self.find_failed_work(mailbox.name)]
        work += [] if file is None else await asyncio.to_thread(ingest_failures, file, mailbox.name)
        search = mailbox.search_unsettled if isinstance(mailbox, OwnedMailbox | SharedMailbox) else None
        opening = open_data(
            self.store, mailbox.name, measure=service.metrics.measure, search_unsettled=search
        )
        data = msgspec.structs.replace(
            await asyncio.to_thread(opened.enter_context, opening),
            leases=None if cluster is None else cluster.list_leases,
            control_plane=cluster,
            decode=self.decode,
            mask=self.settings.mask(),
            serves_calls=self.serves_calls,
            parts=self.parts,
            failed_work=work,
        )
        app: Starlette = make_console(service, data, self.settings, samples, **frame.options, **options)
        await opened.enter_async_context(background_task(app.state.console.sessions.run(service.stopping)))
        return app


@contextmanager
def open_data(
    store: str,
    mailbox: str,
    *,
    measure: Measure | None = None,
    search_unsettled: Search | None = None,
) -> Iterator[ConsoleData]:
    """Open the console's data sources of a store for the duration of the context; see `ConsoleData`.

    Sources that do not exist, or can't be read, are None.

    Arguments:
        search_unsettled: searches the unsettled messages of the mailbox.
    """
    with ExitStack() as opened:
        shown = shown_store(store)
        if store == MEMORY:
            yield ConsoleData(store=shown, measure=measure)
            return
        place = open_store(store)

        def enter(open_each: Callable[[], AbstractContextManager[T]]) -> T | None:
            try:
                return opened.enter_context(open_each())
            except PostroomError:
                return None

        read_models = enter(lambda: _closing(place.read_models))
        log = enter(lambda: _closing(lambda: place.existing_log(mailbox)))
        audit = enter(lambda: read_audit_log(store))
        yield ConsoleData(
            store=shown,
            measure=measure,
            read_models=read_models,
            search_queries=None
            if read_models is None
            else StoreSearchQueries(store, read_models, mailbox, search_unsettled),
            log=log,
            audit=None if audit is None else audit.read,
            audit_log=None if audit is None else audit.log,
        )


@contextmanager
def _closing(open_each: Callable[[], T]) -> Iterator[T]:
    each: Any = open_each()
    try:
        yield each
    finally:
        each.close()


@explain_missing_extra("namespaces")
def payload_decoder(file: str) -> Decode:
    """Return the decoder for the schemas of a namespace file, or raise InvalidRequest."""
    from postroom.adapters.config.namespaces import load_namespaces
    from postroom.adapters.schemas.validator import SchemaDecoder

    return SchemaDecoder({each.name: each.payload_schemas for each in load_namespaces(file)}).decode


@explain_missing_extra("console")
def import_app() -> Callable[..., Any]:
    """Return `make_console`; raise MissingExtra without its packages."""
    import python_multipart  # noqa: F401 - Starlette needs it to parse forms

    from postroom.adapters.console.app import make_console

    return make_console
