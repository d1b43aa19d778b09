"""Commands on a mailbox, wherever it is: in a store, or behind the URL of a server."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.session import Session

if TYPE_CHECKING:
    from postroom.application.operations.mailbox import Mailbox


class ClientSettings(msgspec.Struct, frozen=True):
    """Settings of `[client]`, for a store that is the URL of a server.

    Arguments:
        token_file: file with the token that is sent with each call; `POSTROOM_TOKEN` without one.
        ca, certificate, key: as of `ClientTls`.
    """

    token_file: str | None = None
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None


@asynccontextmanager
async def use_mailbox(session: Session, *, create: bool = False) -> AsyncIterator["Mailbox"]:
    """Use the mailbox of the settings until the context manager exits; see `Session.use`.

    Policies of topics in the settings file are not applied by way of a server.

    Raises: what `Session.use` and `connect_remote` raise.
    """
    if not session.is_remote:
        async with session.use(create=create) as shared:
            yield shared
        return
    from postroom.adapters.cli.token_text import find_token_text
    from postroom.adapters.compose.remote import ClientTls, connect_remote

    settings = session.settings
    client = settings.section("client", ClientSettings)
    files = (client.ca, client.certificate, client.key)
    async with connect_remote(
        session.store,
        settings.mailbox,
        timeout_ms=settings.timeout_ms,
        token=find_token_text(session, client.token_file),
        tls=ClientTls(*files) if any(files) else None,
    ) as mailbox:
        yield mailbox
