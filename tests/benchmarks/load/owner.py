"""A process that owns the mailbox of a store until it is terminated.

python -m tests.benchmarks.load.owner STORE
"""

import asyncio
import signal
import sys

from postroom.adapters.compose.connect import connect
from tests.benchmarks.throughput import LIMITS, POLICY

READY = "ready"


async def _own(store: str) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with connect(store, limits=LIMITS, default_policy=POLICY):
        print(READY, flush=True)
        await stop.wait()


if __name__ == "__main__":
    asyncio.run(_own(sys.argv[1]))
