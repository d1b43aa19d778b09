"""Wiring of the relays that send what transactions recorded for a mailbox; its owner runs them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from postroom.adapters.compose.store import Store, open_store
from postroom.application.background import background_task
from postroom.application.mailbox.send import SendBatch
from postroom.application.outbox.message_relay import MessageRelay
from postroom.domain.errors import Unavailable


@asynccontextmanager
async def relay_outboxes(
    store: Store, addresses: Sequence[str], mailbox: str, send: SendBatch
) -> AsyncIterator[None]:
    """Relay the messages recorded in the store's own database, and in others, while the context lasts.

    Arguments:
        addresses: other databases: paths of SQLite files and `postgresql://...`.

    Raises: Unavailable when one of the others can't have recorded messages.
    """
    async with AsyncExitStack() as opened:
        for place in (store, *map(open_store, dict.fromkeys(addresses))):
            outbox = place.message_outbox(mailbox)
            if outbox is not None:
                opened.push_async_callback(outbox.close)
                relay = MessageRelay(outbox, send, place.where)
                await opened.enter_async_context(background_task(relay.run()))
            elif place is not store:
                raise Unavailable(
                    f"{place.where} has no table outbox_messages; run `postroom migrate --messaging URL` "
                    "once."
                )
        yield
