"""Mailboxes that a console shows beside others: their addresses, and how to open them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.admin import open_control_plane
from postroom.adapters.cli.restrictions import AccessSection
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.settings import InvalidSettings, load_settings
from postroom.adapters.cli.values import WrongUsage
from postroom.adapters.compose.access import Access
from postroom.adapters.compose.console import ConsoleSettings, InstanceSource, check_instance
from postroom.adapters.compose.serve import make_service
from postroom.application.service import Service
from postroom.domain.names import is_mailbox
from postroom.domain.policy import MAX_DURATION_MS

if TYPE_CHECKING:
    from postroom.application.ports.failed_work import FailedWork

OF_PROCESS = ("audit", "console", "serve", "tracing")
"""Sections of the settings file that apply to instances, too; the others are for the process's own store."""
OpenAccess = Callable[[Session], AbstractAsyncContextManager[tuple[Access, str | None]]]
"""Opens the access control of an instance; yields the token of the sessions that the link starts, if any."""
FindFailedWork = Callable[[Session, str], "list[FailedWork]"]
"""Returns the failures of the settings of an instance, for the console of its mailbox."""


def read_instances(texts: Sequence[str]) -> dict[str, str]:
    """Return the addresses of instances by their names, from arguments such as `orders=orders.db`."""
    named: dict[str, str] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not equals or not address:
            raise WrongUsage(f"An instance is NAME=ADDRESS, such as orders=orders.db; it was {text!r}.")
        if check_instance(name) in named:
            raise WrongUsage(f"There are two instances {name}; give them two names.")
        named[name] = address
    return named


def instance_sources(
    session: Session,
    named: Mapping[str, str],
    open_access: OpenAccess,
    find_failed_work: FindFailedWork,
    *,
    read_only: bool = False,
) -> list[InstanceSource]:
    """Return the sources of the mailboxes that a console shows.

    Arguments:
        named: addresses by the names of the instances; see `ConsoleSettings`.
        read_only: refuse all actions at each, whatever its settings say.

    Raises: InvalidSettings for a settings file that is invalid, InvalidRequest for the URL of a server or a
        namespace.
    """
    sources = []
    for name, address in named.items():
        each = _session_of(session, address)
        each.check_one_mailbox()
        if each.is_remote:
            raise InvalidSettings(
                f"The instance {name} is the URL of a server; name its store, or open the console that the "
                "server has."
            )
        settings = each.settings.section("console", ConsoleSettings, {"read_only": read_only or None})
        sources.append(
            InstanceSource(
                name,
                each.store,
                settings,
                partial(_open_service, each, open_access),
                partial(open_control_plane, each),
                partial(find_failed_work, each),
            )
        )
    return sources


def _session_of(session: Session, address: str) -> Session:
    """Return the session of an instance."""
    settings = session.settings
    if address.endswith(".toml"):
        return session.with_settings(load_settings({}, {}, address))
    if is_mailbox(address):
        return session.with_settings(msgspec.structs.replace(settings, mailbox=address))
    sections = {name: values if name in OF_PROCESS else {} for name, values in settings.sections.items()}
    return session.with_settings(msgspec.structs.replace(settings, store=address, sections=sections))


@asynccontextmanager
async def _open_service(
    session: Session, open_access: OpenAccess, stopping: asyncio.Event
) -> AsyncIterator[tuple[Service, str | None]]:
    """Use the mailbox of an instance; see `InstanceSource`."""
    async with (
        # A console must not replace an owner that is slow to answer, and sets no policies.
        session.use(owner_timeout_ms=MAX_DURATION_MS, gives_settings=False) as mailbox,
        open_access(session) as (access, token),
    ):
        yield (
            make_service(
                session.store,
                mailbox,
                access=access,
                measure=mailbox.measure,
                cap_cache_ttl_ms=session.settings.section("access", AccessSection).cap_cache_ttl_ms,
                stopping=stopping,
            ),
            token,
        )
