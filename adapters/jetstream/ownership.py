"""The ownership port over JetStream: a record names the owner, which answers under its token (ADR 0148).

No clock counts: who finds that the owner's connection is gone, or that it is silent for long, replaces its
record; the log refuses what a former owner appends after the new one has written to it.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from hashlib import sha256

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError

from postroom.adapters.jetstream.client import SubjectChanged
from postroom.adapters.jetstream.frames import seal, unseal
from postroom.adapters.jetstream.store_streams import OpenStreams, StoreStreams, token_of
from postroom.application.ports.lease_store import OwnerAddress, OwnerDirectory, Ownership
from postroom.application.telemetry import logger
from postroom.domain.errors import MailboxOwned, NotFound, PostroomError, Unavailable

POLL_SECONDS = 0.02
PING_SECONDS = 1.0
ABSENT_SECONDS = 2.0
"""Time without a connection of the owner after which it counts as gone; a client reconnects sooner."""
SILENT_SECONDS = 10.0
"""The same for an owner that is connected but does not answer."""
TICKET_BYTES, TICKET_SECONDS, MAX_TICKETS = 32, 60.0, 1_000
_PING, _TICKET, _YES = b"ping", b"ticket ", b"yes"


class _Owner(msgspec.Struct, frozen=True, array_like=True):
    """The record of an ownership; `token` is unique to it, and empty when nobody owns the mailbox."""

    owner: str = ""
    token: str = ""
    address: str = ""
    certificate: str = ""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Owner).decode


class JetStreamOwnership(Ownership, OwnerDirectory):
    """Ownership of mailboxes by records in a store's second stream.

    The record only prevents conflicts: two processes that both take themselves for the owner are told apart
    by the log.
    """

    def __init__(self, streams: StoreStreams) -> None:
        self._shared = streams
        self._owned: dict[str, _Ownership] = {}
        self._missed: dict[tuple[str, bool], float] = {}
        """When an owner was first found absent, or silent, by its token."""

    @property
    def directory(self) -> "JetStreamOwnership":
        return self

    @asynccontextmanager
    async def acquire(self, mailbox: str, owner: str, wait_ms: int) -> AsyncIterator[None]:
        now = asyncio.get_running_loop().time
        deadline = now() + wait_ms / 1_000
        streams = await self._open(create=True)
        async with AsyncExitStack() as stack:
            stack.push_async_callback(asyncio.to_thread, self._shared.close)
            own = _Ownership(streams, mailbox, owner)
            stack.push_async_callback(own.release)
            await own.answer()
            while True:
                record, sequence = await _find(streams, mailbox)
                seconds = min(PING_SECONDS, max(deadline - now(), PING_SECONDS / 2))
                is_free = not record.token or await self._is_gone(streams, record.token, seconds)
                if is_free and await own.take(sequence):
                    break
                if now() >= deadline:
                    raise MailboxOwned(mailbox, record.owner)
                await asyncio.sleep(POLL_SECONDS)
            self._missed.pop((record.token, True), None)
            self._missed.pop((record.token, False), None)
            self._owned[mailbox] = own
            try:
                yield
            finally:
                if self._owned.get(mailbox) is own:
                    del self._owned[mailbox]

    async def owner(self, mailbox: str) -> str | None:
        async with self._streams() as streams:
            record = await _find_record(streams, mailbox)
            is_there = streams and record.token and await _ask(streams, record.token, _PING) is not None
            return record.owner if is_there else None

    async def incumbent(self, mailbox: str) -> str | None:
        async with self._streams() as streams:
            return (await _find_record(streams, mailbox)).token or None

    async def evict(self, mailbox: str, incumbent: str) -> None:
        async with self._streams() as streams:
            if streams is not None:
                await _replace(streams, mailbox, incumbent, _Owner())

    # -- the addresses of owners ---

    async def local_host(self, mailbox: str) -> str:
        return await self._own(mailbox).local_host()

    async def announce(self, mailbox: str, address: OwnerAddress) -> None:
        await self._own(mailbox).announce(address)

    async def find(self, mailbox: str) -> OwnerAddress | None:
        async with self._streams() as streams:
            record = await _find_record(streams, mailbox)
            return OwnerAddress(record.address, record.certificate) if record.address else None

    async def issue_ticket(self, mailbox: str) -> bytes:
        ticket = secrets.token_bytes(TICKET_BYTES)
        async with self._streams() as streams:
            record = await _find_record(streams, mailbox)
            request = _TICKET + sha256(ticket).digest()
            if streams is None or not record.token or not await _ask(streams, record.token, request):
                raise Unavailable(f"The owner of mailbox {mailbox} does not answer; retry shortly.")
        return ticket

    async def redeem_ticket(self, mailbox: str, ticket: bytes) -> bool:
        return self._own(mailbox).redeem(ticket)

    def _own(self, mailbox: str) -> "_Ownership":
        if mailbox not in self._owned:
            raise _not_owned(mailbox)
        return self._owned[mailbox]

    @asynccontextmanager
    async def _streams(self) -> AsyncIterator[OpenStreams | None]:
        """Open the streams while the context lasts; None before there is a store."""
        try:
            streams = await self._open(create=False)
        except NotFound:
            yield None
            return
        try:
            yield streams
        finally:
            await asyncio.to_thread(self._shared.close)

    async def _open(self, *, create: bool) -> OpenStreams:
        """Open the streams in a thread; if the caller was cancelled meanwhile, they are closed."""
        opening = asyncio.create_task(asyncio.to_thread(self._shared.open, create=create))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            with suppress(PostroomError):
                await opening
                await asyncio.to_thread(self._shared.close)
            raise

    async def _is_gone(self, streams: OpenStreams, token: str, seconds: float) -> bool:
        """Return whether an owner was absent, or silent, for so long that it counts as gone.

        Arguments:
            seconds: to wait for its answer.
        """
        answer = await _ask(streams, token, _PING, seconds)
        is_absent = answer is None
        self._missed.pop((token, not is_absent), None)
        if answer:
            self._missed.pop((token, is_absent), None)
            return False
        first = self._missed.setdefault((token, is_absent), time.monotonic())
        return time.monotonic() - first >= (ABSENT_SECONDS if is_absent else SILENT_SECONDS)


class _Ownership:
    """The record of one mailbox while this process may own it, and the answers under its token."""

    def __init__(self, streams: OpenStreams, mailbox: str, owner: str) -> None:
        self._streams = streams
        self._mailbox = mailbox
        self._record = _Owner(owner, secrets.token_hex(16))
        self._is_taken = False
        self._tickets: dict[bytes, float] = {}
        self._stack = AsyncExitStack()

    async def answer(self) -> None:
        """Answer under the token from now on; other servers know it when this returns, or soon after."""
        client, subject = self._streams.client, _subject(self._streams, self._record.token)

        async def subscribe(_: float) -> None:
            subscription = await client.subscribe(subject, cb=self._reply)
            self._stack.push_async_callback(subscription.unsubscribe)
            await client.flush()

        try:
            await self._streams.run(subscribe)
        except (NatsError, OSError, TimeoutError) as error:
            raise _unavailable(self._streams, error) from error

    async def take(self, sequence: int) -> bool:
        """Write the record in place of the message with a sequence; return False if there is another one."""
        self._is_taken = True  # unless it is refused: a failure leaves it unknown
        self._is_taken = await _write(self._streams, self._mailbox, self._record, sequence)
        return self._is_taken

    async def release(self) -> None:
        """Clear the record if it is still this one, and answer no more."""
        with suppress(PostroomError):  # the next owner finds this one absent
            if self._is_taken:
                await _replace(self._streams, self._mailbox, self._record.token, _Owner())
        with suppress(PostroomError, NatsError, OSError):
            await self._streams.run(lambda _: self._stack.aclose())

    async def announce(self, address: OwnerAddress) -> None:
        record = msgspec.structs.replace(
            self._record, address=address.address, certificate=address.certificate
        )
        if record != self._record:
            if not await _replace(self._streams, self._mailbox, record.token, record):
                raise _not_owned(self._mailbox)
            self._record = record

    async def local_host(self) -> str:
        client = self._streams.client

        async def find(_: float) -> str:
            writer = getattr(client._transport, "_io_writer", None)  # nats-py has no accessor
            if writer is None:
                raise Unavailable("There is no connection to NATS at the moment; retry shortly.")
            return str(writer.get_extra_info("sockname")[0])

        return await self._streams.run(find)

    def redeem(self, ticket: bytes) -> bool:
        """Consume a ticket; return whether it was valid."""
        expires = self._tickets.pop(sha256(ticket).digest(), 0.0)
        return expires > time.monotonic()

    async def _reply(self, message: Msg) -> None:
        if message.data.startswith(_TICKET):
            now = time.monotonic()
            self._tickets = {each: end for each, end in self._tickets.items() if end > now}
            if len(self._tickets) >= MAX_TICKETS:
                return
            self._tickets[bytes(message.data[len(_TICKET) :])] = now + TICKET_SECONDS
        with suppress(NatsError, OSError):
            await message.respond(_YES)


def _subject(streams: OpenStreams, token: str) -> str:
    return f"{streams.settings.stream}_OWNERS.{token}"


def _record_subject(streams: OpenStreams, mailbox: str) -> str:
    return f"{streams.settings.state_stream}.owner.{token_of(mailbox)}"


async def _ask(
    streams: OpenStreams, token: str, request: bytes, seconds: float = PING_SECONDS
) -> bytes | None:
    """Return the answer of an owner: empty if it is silent, None if its connection is gone."""
    client, subject = streams.client, _subject(streams, token)

    async def ask(_: float) -> bytes | None:
        try:
            return (await client.request(subject, request, timeout=seconds)).data
        except NoRespondersError:
            return None
        except TimeoutError:
            return b""

    try:
        return await streams.run(ask)
    except (NatsError, OSError) as error:
        raise _unavailable(streams, error) from error


async def _find(streams: OpenStreams, mailbox: str) -> tuple[_Owner, int]:
    """Return the record of a mailbox, and the sequence of its message."""
    message = await streams.run(partial(streams.state.last, _record_subject(streams, mailbox)))
    return (_Owner(), 0) if message is None else (_decode(unseal(message)), message.sequence)


async def _find_record(streams: OpenStreams | None, mailbox: str) -> _Owner:
    return _Owner() if streams is None else (await _find(streams, mailbox))[0]


async def _write(streams: OpenStreams, mailbox: str, record: _Owner, sequence: int) -> bool:
    subject = _record_subject(streams, mailbox)
    body = seal(subject, _encode(record))
    try:
        await streams.run(partial(streams.state.append, subject, [body], sequence))
    except SubjectChanged:
        return False
    return True


async def _replace(streams: OpenStreams, mailbox: str, token: str, record: _Owner) -> bool:
    """Write a record if the present one has a token; return whether it had."""
    while True:
        present, sequence = await _find(streams, mailbox)
        if present.token != token:
            return False
        if await _write(streams, mailbox, record, sequence):
            return True  # else it was changed meanwhile, also by an earlier call that was cancelled


def _not_owned(mailbox: str) -> Unavailable:
    return Unavailable(f"This process does not own mailbox {mailbox} any more; retry shortly.")


def _unavailable(streams: OpenStreams, error: BaseException) -> Unavailable:
    logger().warning("store.unreachable", store=streams.settings.where, error=str(error))
    return Unavailable(
        f"NATS at {streams.settings.nats.shown_url} can't be used: {str(error) or type(error).__name__}; "
        "retry shortly."
    )
