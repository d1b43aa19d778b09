"""Clients that send, receive and ack while a cluster fails, and note what they were answered."""

import asyncio
import threading
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

from postroom.adapters.grpc.client import connect_grpc
from postroom.application.messages import NewMessage
from postroom.domain.errors import PostroomError, StaleReceipt, WrongOwner
from tests.linearizability.history import Recorder
from tests.linearizability.models import REFUSED
from tests.linearizability.node import TOPIC

CALL_MS = 1_500
PAUSE_SECONDS = 0.03


class Clients:
    """Clients of some mailboxes in a thread; each asks one runner after the other until one answers.

    Arguments:
        runners: addresses of their servers.
        folder: of the journals.
    """

    def __init__(self, runners: Sequence[str], mailboxes: Sequence[str], folder: Path) -> None:
        self._runners = runners
        self._mailboxes = mailboxes
        self._folder = folder
        self._ending = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.answers = 0

    def __enter__(self) -> "Clients":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for mailbox in self._mailboxes:
                tasks.create_task(self._send(mailbox))
                tasks.create_task(self._receive(mailbox))

    async def _send(self, mailbox: str) -> None:
        async with AsyncExitStack() as opened:
            recorder = opened.enter_context(Recorder(self._folder / f"send-{mailbox}.journal", "sender"))
            runners = _Runners(self._runners, mailbox, opened)
            number = 0
            while not self._ending.is_set():
                number += 1
                payload = f"{mailbox} {number}"
                call = recorder.call(payload, "send", [])
                try:
                    await (await runners.present()).send_message(
                        NewMessage(topic=TOPIC, payload=payload.encode(), sticky_key=str(number % 4))
                    )
                except PostroomError as error:
                    if isinstance(error, WrongOwner):
                        recorder.answer(call, REFUSED)
                    runners.advance()
                else:
                    recorder.answer(call, True)
                    self.answers += 1
                await asyncio.sleep(PAUSE_SECONDS)

    async def _receive(self, mailbox: str) -> None:
        async with AsyncExitStack() as opened:
            recorder = opened.enter_context(Recorder(self._folder / f"receive-{mailbox}.journal", "receiver"))
            runners = _Runners(self._runners, mailbox, opened)
            random = Random(mailbox)
            while not self._ending.is_set():
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
            self.answers += 1


class _Runners:
    """Connections of one client."""

    def __init__(self, addresses: Sequence[str], mailbox: str, opened: AsyncExitStack) -> None:
        self._addresses = addresses
        self._mailbox = mailbox
        self._opened = opened
        self._clients: dict[str, Any] = {}
        self._number = 0

    async def present(self) -> Any:
        address = self._addresses[self._number % len(self._addresses)]
        if address not in self._clients:
            self._clients[address] = await self._opened.enter_async_context(
                connect_grpc(address, timeout_ms=CALL_MS, mailbox=self._mailbox)
            )
        return self._clients[address]

    def advance(self) -> None:
        self._number += 1
