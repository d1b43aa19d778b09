"""What it costs to check the capability of a call: the token itself, and a call on a mailbox in memory."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from hmac import digest
from pathlib import Path
from statistics import median
from typing import Any

from postroom.application.operations.mailbox import Mailbox
from postroom.domain.capability.access import verify
from postroom.domain.capability.rights import Caveat, MaxMessages, Operations, Right, Topics
from postroom.domain.capability.token import Token
from tests.benchmarks.figures import RUNS, Figures
from tests.support.access import controlled_mailbox

CALLS = 2_000
HASH = 32
"""Bytes of the text of each bare hash, about those of a caveat."""
GOAL, CACHE_GOAL = 6, 0.1
"""How many times as long as one bare hash for each part of the token a verification may take, and how many
times as long as a verification the answer of the cache."""
CAVEATS: list[Caveat] = [
    Topics(("orders", "orders.*")),
    Operations((Right.SEND, Right.RECV, Right.ACK)),
    *(MaxMessages(100 + number) for number in range(5)),
]
"""Seven, and the expiry that every capability has."""


async def _microseconds(call: Callable[[], Awaitable[Any]]) -> float:
    """Return the median time of a call on a processor, in µs."""
    runs = []
    for _ in range(RUNS):
        start = time.process_time()
        for _ in range(CALLS):
            await call()
        runs.append((time.process_time() - start) / CALLS * 1e6)
    return median(runs)


async def _measure(figures: Figures) -> None:
    async with controlled_mailbox() as place:
        text = place.issue(*CAVEATS)
        (key,) = place.keys.root_keys()

        async def check() -> None:
            verify(Token.decode(text), key.secret)

        async def hash_parts() -> None:
            tag = key.secret
            for _ in range(len(CAVEATS) + 2):
                tag = digest(tag, bytes(HASH), "sha256")

        verification, bare = await _microseconds(check), await _microseconds(hash_parts)
        figures.add("access.verify", verification, "µs")
        figures.add("access.verify.of_bare_hashes", verification / bare, "x", GOAL)
        session = await place.control.open_session(text)
        cached = await _microseconds(lambda: place.control.open_session(text))
        figures.add("access.cached", cached, "µs")
        figures.add("access.cached.of_verify", cached / verification, "x", CACHE_GOAL)

        def receive(mailbox: Mailbox) -> Callable[[], Awaitable[Any]]:
            return lambda: mailbox.receive_messages("orders")

        figures.add("access.call.direct", await _microseconds(receive(place.mailbox)), "µs")
        figures.add("access.call.checked", await _microseconds(receive(session.mailbox)), "µs")


def _run(figures: Figures, _folder: Path, _messages: int) -> None:
    asyncio.run(_measure(figures))


MEASUREMENTS: dict[str, Callable[[Figures, Path, int], None]] = {"access.": _run}
