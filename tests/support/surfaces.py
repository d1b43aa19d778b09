"""Mailboxes that a surface serves within the test's own process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from postroom.adapters.compose import OwnedMailbox
from postroom.adapters.compose.serve import (
    HttpSettings,
    SurfaceProtection,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)


@asynccontextmanager
async def served(
    mailbox: OwnedMailbox,
    protocol: str,
    address: str = "127.0.0.1:0",
    *,
    settings: HttpSettings | None = None,
    access: Any = unrestricted,
    protection: SurfaceProtection | None = None,
    mount: Any = None,
    measure: Any = None,
) -> AsyncIterator[str]:
    """Serve a mailbox over `http` or `grpc`, and return the URL."""
    mounts = [] if mount is None else [mount]
    surface = (
        open_grpc_surface(address, protection, settings)
        if protocol == "grpc"
        else open_http_surface(address, settings or HttpSettings(), protection, *mounts)
    )
    async with serve_mailbox("memory:", mailbox, [surface], access=access, measure=measure) as (url,):
        yield url
