"""`kill -9` of PostgreSQL, and of a process that sends to it: what was acknowledged is there, once."""

import asyncio
import random
from uuid import UUID

import pytest

from postroom.adapters.compose import OwnedMailbox, open_mailbox
from postroom.adapters.compose.maintenance import migrate_store
from postroom.adapters.compose.queries import read_mailbox
from postroom.application.mailbox import engine
from postroom.application.messages import NewMessage, Sent
from postroom.domain.errors import Unavailable
from tests.integration.test_crash_kill import Witness, check, drain, run_until_killed
from tests.support.servers.postgres import PostgresServer

SENDER_KILLS = 5
SERVER_KILLS = 4
CALLERS = 4


async def test_a_killed_sender_loses_nothing_that_was_acknowledged_and_undoes_no_ack(
    postgres_store: str,
) -> None:
    witness = Witness()
    moments = random.Random(1)
    for run in range(SENDER_KILLS):
        run_until_killed(postgres_store, f"run{run}", moments.randint(1, 50), witness)
        await check(postgres_store, witness)
    assert len(witness.sent) > 5 * SENDER_KILLS
    await drain(postgres_store, witness)


async def test_a_killed_server_loses_nothing_that_was_acknowledged(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RECOVERY_SECONDS", 0.05)
    store = postgres_server.create_database()
    migrate_store(store)
    acknowledged: dict[str, str] = {}
    moments = random.Random(2)
    async with open_mailbox(store, owner="the survivor") as mailbox:
        for run in range(SERVER_KILLS):
            callers = [asyncio.create_task(send(mailbox, f"{run}-{n}", acknowledged)) for n in range(CALLERS)]
            wanted = len(acknowledged) + moments.randint(10, 300)
            while len(acknowledged) < wanted:
                await asyncio.sleep(0.001)
            postgres_server.kill()
            await asyncio.gather(*callers)  # each ends at its first failure
            postgres_server.start()
        await send_when_possible(mailbox)
        key, id_ = list(acknowledged.items())[-1]
        assert await mailbox.send_message(message(key)) == Sent(id_, duplicate=True)
    with read_mailbox(store) as reader:
        verified = reader.verify_log()
        sent = [record.stream for record in reader.log.read() if record.type.startswith("MessageSent")]
        kept = [str(UUID(bytes=stream)) for stream in sent]
    assert set(acknowledged.values()) <= set(kept)
    assert len(kept) == len(set(kept)) == verified.messages
    # Of each caller at most one batch was under way when the server died.
    assert len(kept) <= len(acknowledged) + SERVER_KILLS * CALLERS * 3 + 1


def message(key: str) -> NewMessage:
    return NewMessage(topic="orders", payload=key.encode(), idem_key=key)


async def send(mailbox: OwnedMailbox, run: str, acknowledged: dict[str, str]) -> None:
    """Send until that fails."""
    for number in range(100_000):
        keys = [f"{run}-{number}-{place}" for place in range(3)]
        try:
            answers = await mailbox.send_batch([message(key) for key in keys])
        except Unavailable:
            return
        for key, answer in zip(keys, answers, strict=True):
            assert isinstance(answer, Sent)
            acknowledged[key] = answer.message_id


async def send_when_possible(mailbox: OwnedMailbox) -> None:
    for _ in range(1_000):
        try:
            await mailbox.send_message(message("afterwards"))
        except Unavailable:
            await asyncio.sleep(0.01)
        else:
            return
    pytest.fail("The mailbox never recovered.")
