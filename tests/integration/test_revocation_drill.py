"""Revocation and rotation under live traffic: no new operation succeeds, and nothing is lost or stranded."""

import asyncio
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.access import open_access, open_capabilities, open_key_ring
from postroom.adapters.compose.connect import connect_remote
from postroom.application.access.guard import MIN_CACHE_TTL_MS, AccessSettings
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.application.received_messages import ReceivedMessage
from postroom.domain.capability.rights import Right, Rights
from postroom.domain.capability.token import Token
from postroom.domain.errors import Unauthenticated
from tests.support.stores import MAILBOX
from tests.support.surfaces import served
from tests.support.waiting import until, within

TOPIC = "orders"
HOUR_MS = 3_600_000
TIMEOUT_MS = 240_000
PAUSE_SECONDS = 0.05
REVOKE = (
    "import sys; from postroom.adapters.compose.access import open_capabilities\n"
    "with open_capabilities(sys.argv[1]) as capabilities: capabilities.revoke(bytes.fromhex(sys.argv[2]))"
)


class Traffic:
    """One caller that sends, receives and acks, and notes when it began each call.

    Arguments:
        latest: when the last call that succeeded, and was no ack, was begun; of the monotonic clock.
    """

    def __init__(self, mailbox: Mailbox, acked: Counter[str], sent: set[str]) -> None:
        self.mailbox = mailbox
        self.acked = acked
        self.sent = sent
        self.latest = 0.0
        self.calls = self.refusals = 0
        self.stopped = False

    async def send(self) -> None:
        """Send messages until the end."""
        while not self.stopped:
            began_at = time.monotonic()
            try:
                sent = await self.mailbox.send_message(NewMessage(topic=TOPIC, payload=b"x"))
                self.sent.add(sent.message_id)
                self._note(began_at)
            except Unauthenticated:
                self.refusals += 1
            await asyncio.sleep(PAUSE_SECONDS)

    async def consume(self) -> None:
        """Receive messages, hold them for a moment, and ack them, until the end."""
        while not self.stopped:
            began_at = time.monotonic()
            try:
                received = await self.mailbox.receive_messages(TOPIC, max_messages=4, visibility_ms=HOUR_MS)
                self._note(began_at)
            except Unauthenticated:
                received = []
                self.refusals += 1
            await asyncio.sleep(PAUSE_SECONDS)
            await self.ack(received)

    async def ack(self, received: list[ReceivedMessage]) -> None:
        """Ack deliveries, which always succeeds."""
        if received:
            answers = await self.mailbox.ack_messages([each.receipt for each in received])
            assert answers == [None] * len(received)
            self.acked.update(each.message_id for each in received)

    def _note(self, began_at: float) -> None:
        self.calls += 1
        self.latest = max(self.latest, began_at)


async def test_a_revocation_under_traffic_ends_new_calls_in_time_and_strands_nothing(tmp_path: Path) -> None:
    """Meanwhile keys are rotated, and what the old key signed stays valid for the overlap."""
    store = str(tmp_path / "store.db")
    settings = AccessSettings(cap_cache_ttl_ms=MIN_CACHE_TTL_MS)
    rights = Rights(operations=(Right.SEND, Right.RECV, Right.ACK))
    acked: Counter[str] = Counter()
    sent: set[str] = set()
    async with AsyncExitStack() as opened:
        capabilities = opened.enter_context(open_capabilities(store, open_key_ring(store)))
        capabilities.rotate()
        tokens = {name: capabilities.issue(name, rights) for name in ("revoked", "kept")}
        mailbox = await opened.enter_async_context(open_mailbox(store, MAILBOX, durability="relaxed"))
        access = await opened.enter_async_context(open_access(store, settings=settings))
        url = await opened.enter_async_context(served(mailbox, "http", access=access))
        tasks: list[asyncio.Task[None]] = []

        async def connect(token: str) -> Traffic:
            client = None
            async with asyncio.timeout(TIMEOUT_MS / 1_000):
                while client is None:  # a key that is a moment old may not have been read yet
                    with suppress(Unauthenticated):
                        remote = connect_remote(url, timeout_ms=TIMEOUT_MS, token=token)
                        client = await opened.enter_async_context(remote)
            traffic = Traffic(client, acked, sent)
            tasks.extend(asyncio.create_task(each) for each in (traffic.send(), traffic.consume()))
            return traffic

        revoked, kept = [await connect(token) for token in tokens.values()]
        await until(lambda: min(revoked.calls, kept.calls) > 4)
        capabilities.rotate(overlap_ms=HOUR_MS)
        renewed = await connect(capabilities.issue("renewed", rights))
        await revoked.mailbox.send_batch([NewMessage(topic=TOPIC + ".held", payload=b"x")] * 3)
        held = await revoked.mailbox.receive_messages(TOPIC + ".held", visibility_ms=HOUR_MS)

        nonce = Token.decode(tokens["revoked"]).read_identifier().nonce.hex()
        revoking = await asyncio.create_subprocess_exec(sys.executable, "-c", REVOKE, store, nonce)
        assert await within(revoking.wait()) == 0
        deadline = time.monotonic() + settings.cap_cache_ttl_ms / 1_000
        await until(lambda: time.monotonic() > deadline + 4 * PAUSE_SECONDS)
        refusals, calls = revoked.refusals, (kept.calls, renewed.calls)
        await until(lambda: revoked.refusals > refusals + 4)
        assert len(held) == 3
        await revoked.ack(held)
        await until(lambda: kept.calls > calls[0] + 4 and renewed.calls > calls[1] + 4)
        for each in (revoked, kept, renewed):
            each.stopped = True
        await asyncio.gather(*tasks)
    assert revoked.latest < deadline
    assert kept.refusals == renewed.refusals == 0
    async with open_mailbox(store, MAILBOX) as mailbox:
        while rest := await mailbox.receive_messages(TOPIC):
            await mailbox.ack_messages([each.receipt for each in rest])
            acked.update(each.message_id for each in rest)
        backlog = await mailbox.get_backlog()
    assert [
        each for each in backlog.shards if each.ready or each.in_flight or each.dead or each.delayed
    ] == []
    assert set(acked.values()) == {1}
    assert acked.keys() == sent | {each.message_id for each in held}
