"""Clients of a stopped NATS server, closed or cancelled at every point of a reconnect; run as a process.

Before Python 3.12, `asyncio.wait_for` drops a cancellation that comes within two iterations of the event loop
after the connection attempt failed. Here an iteration takes 20 ms, as on a busy machine, and each client is
closed or cancelled one iteration later than the one before it.
"""

import asyncio
import sys
import threading
import time
from contextlib import AsyncExitStack

from postroom.adapters.nats.connection import connect
from postroom.adapters.nats.settings import NatsSettings

ITERATION_SECONDS = 0.02
ITERATIONS = 24
"""More than one attempt and the pause before it take."""
CONNECT_SECONDS = 60.0

never_closed: list[AsyncExitStack] = []
"""Referenced until the process ends, so that garbage collection doesn't close them."""


async def reconnect(url: str, iterations: int, is_closing: bool, connected: threading.Barrier) -> None:
    """Connect, and return some iterations after an attempt to reconnect failed.

    Arguments:
        is_closing: close the client before; otherwise `asyncio.run` cancels its tasks.
        connected: passed when all clients are connected.
    """
    resources = AsyncExitStack()
    client = await resources.enter_async_context(connect(NatsSettings(url), "test"))
    await asyncio.to_thread(connected.wait)
    slow_down()
    while not isinstance(client.last_error, ConnectionRefusedError):
        await asyncio.sleep(0)
    for _ in range(iterations):
        await asyncio.sleep(0)
    if is_closing:
        await resources.aclose()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        assert not tasks, tasks
    else:
        never_closed.append(resources)


def slow_down() -> None:
    """Make each iteration of the running loop take `ITERATION_SECONDS`."""
    time.sleep(ITERATION_SECONDS)
    asyncio.get_running_loop().call_soon(slow_down)


def main(url: str, is_closing: bool) -> None:
    """Run the clients, each on a loop of its own; print a line when the server is to be stopped."""
    connected = threading.Barrier(ITERATIONS + 1, timeout=CONNECT_SECONDS)
    threads = [
        threading.Thread(target=lambda n=n: asyncio.run(reconnect(url, n, is_closing, connected)))
        for n in range(ITERATIONS)
    ]
    for thread in threads:
        thread.start()
    connected.wait()
    print("connected", flush=True)
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "close")
