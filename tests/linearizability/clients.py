"""Clients that send, receive and ack while a cluster fails, and note what they were answered.

    python -m tests.linearizability.clients SETTINGS

SETTINGS is a JSON object; see `Settings`.
"""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from postroom.adapters.grpc.client import connect_grpc
from postroom.application.messages import NewMessage
from postroom.domain.errors import PostroomError, StaleReceipt, WrongOwner
from tests.linearizability.history import Recorder
from tests.linearizability.models import REFUSED
from tests.linearizability.node import TOPIC, join_group

CALL_MS = 1_500
PATIENT_MS = 20_000
"""Time for a call of the sender that waits also for owners that are paused."""
PAUSE_SECONDS = 0.03


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of some mailboxes are.

    Arguments:
        runners: addresses of their servers; each client asks one after the other until one answers.
        folder: of the journals.
        start: number of this start; each has journals and messages of its own.
        group: see `join_group`.
    """

    name: str
    runners: tuple[str, ...]
    mailboxes: tuple[str, ...]
    folder: str
    start: int = 1
    group: int = 0


class Clients:
    """Two senders and a receiver of each mailbox."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    async def run(self) -> None:
        """Use the mailboxes until the process is ended."""
        async with asyncio.TaskGroup() as tasks:
            for mailbox in self._settings.mailboxes:
                tasks.create_task(self._send(mailbox, "send", CALL_MS))
                tasks.create_task(self._send(mailbox, "patient", PATIENT_MS))
                tasks.create_task(self._receive(mailbox))

    def _recorder(self, kind: str, mailbox: str) -> Recorder:
        start = self._settings.start
        path = Path(self._settings.folder, f"{kind}-{start}-{mailbox}.journal")
        return Recorder(path, f"{kind}-{start}")

    async def _send(self, mailbox: str, kind: str, timeout_ms: int) -> None:
        """Send messages, every other one with an idempotency key, and these until there is an answer."""
        async with AsyncExitStack() as opened:
            recorder = opened.enter_context(self._recorder(kind, mailbox))
            runners = _Runners(self._settings.runners, mailbox, opened, timeout_ms)
            number = 0
            while True:
                number += 1
                payload = f"{mailbox} {kind} {self._settings.start}.{number}"
                message = NewMessage(
                    topic=TOPIC,
                    payload=payload.encode(),
                    sticky_key=str(number % 4),
                    idem_key=payload if number % 2 else None,
                )
                call = recorder.call(payload, "send", [])
                while True:
                    try:
                        await (await runners.present()).send_message(message)
                        recorder.answer(call, True)
                        break
                    except PostroomError as error:
                        runners.advance()
                        if message.idem_key is None:
                            if isinstance(error, WrongOwner):
                                recorder.answer(call, REFUSED)
                            break
                    await asyncio.sleep(PAUSE_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)

    async def _receive(self, mailbox: str) -> None:
        async with AsyncExitStack() as opened:
            recorder = opened.enter_context(self._recorder("receive", mailbox))
            runners = _Runners(self._settings.runners, mailbox, opened, CALL_MS)
            random = Random(mailbox)
            while True:
                call = recorder.call("", "receive", [])
                try:
                    received = await (await runners.present()).receive_messages(
                        TOPIC, max_messages=8, wait_ms=100
                    )
                except PostroomError:
                    runners.advance()
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                recorder.answer(call, [[each.payload.decode(), each.attempt] for each in received])
                for each in received:
                    if random.random() < 0.8:
                        await self._ack(recorder, each)

    async def _ack(self, recorder: Recorder, received: Any) -> None:
        call = recorder.call(received.payload.decode(), "ack", [received.attempt])
        try:
            await received.ack()
        except (StaleReceipt, WrongOwner):
            recorder.answer(call, REFUSED)
        except PostroomError:  # nobody knows
            return
        else:
            recorder.answer(call, True)


class _Runners:
    """Connections of one client."""

    def __init__(
        self, addresses: Sequence[str], mailbox: str, opened: AsyncExitStack, timeout_ms: int
    ) -> None:
        self._timeout_ms = timeout_ms
        self._addresses = addresses
        self._mailbox = mailbox
        self._opened = opened
        self._clients: dict[str, Any] = {}
        self._number = 0

    async def present(self) -> Any:
        address = self._addresses[self._number % len(self._addresses)]
        if address not in self._clients:
            self._clients[address] = await self._opened.enter_async_context(
                connect_grpc(address, timeout_ms=self._timeout_ms, mailbox=self._mailbox)
            )
        return self._clients[address]

    def advance(self) -> None:
        self._number += 1


if __name__ == "__main__":
    settings = msgspec.json.decode(sys.argv[1], type=Settings)
    join_group(settings.group)
    asyncio.run(Clients(settings).run())
