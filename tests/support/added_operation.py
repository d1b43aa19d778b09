"""An operation that a developer adds, called over every surface; run as a program of its own.

All that is written for it stands before `main`: the method of the port, and the owner's handler.
"""

import asyncio
import inspect
import json
import sys
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from postroom.application.operations import mailbox as port
from postroom.application.operations.operation import operation
from postroom.domain.capability.rights import Right


@operation(Right.READ_HEADERS, "GET /v1/topics/count", answer="topics")
async def count_topics(  # type: ignore[empty-body] # as the methods of the port
    self: Any, /, *, least: port.Position = 1
) -> int:
    """Count the topics with at least `least` ready messages."""


async def handle(self: Any, /, *, least: int = 1) -> int:
    return sum(each.ready >= least for each in await self.list_topics())


port.Mailbox.count_topics = count_topics  # type: ignore[attr-defined]
port.OPERATIONS["count_topics"] = count_topics.__operation__  # type: ignore[attr-defined]

# What derives from the port is imported after the operation was added to it.
from postroom import Forbidden, InvalidRequest, NewMessage, connect, open_mailbox  # noqa: E402
from postroom.adapters.compose import OwnerHandlers  # noqa: E402
from postroom.adapters.compose.connect import connect_remote  # noqa: E402
from scripts.operations import make  # noqa: E402
from tests.support.access import controlled_mailbox  # noqa: E402
from tests.support.namespaces import open_namespace  # noqa: E402
from tests.support.surfaces import served  # noqa: E402

OwnerHandlers.count_topics = handle  # type: ignore[attr-defined]


async def main(folder: Path) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    store = str(folder / "store.db")
    messages = [NewMessage(topic=topic, payload=b"") for topic in ("a.1", "a.2", "a.2", "b")]
    async with open_mailbox(store) as owner:
        await owner.send_batch(messages)
        answers["owner"] = await count(owner, least=2)
        async with connect(store) as other:
            answers["local socket"] = await count(other, least=2)
            try:
                await count(other, least=-1)
            except InvalidRequest as refusal:
                answers["bounds"] = str(refusal)
        answers["threads"] = await asyncio.to_thread(in_threads, store)
        for surface in ("http", "grpc"):
            async with (
                served(owner, surface) as address,
                connect_remote(address, timeout_ms=10_000) as client,
            ):
                if surface == "http":
                    answers["openapi"] = await asyncio.to_thread(describe, address)
                try:
                    answers[surface] = await count(client, least=2)
                except InvalidRequest as refusal:
                    answers[surface] = str(refusal)
    async with open_namespace("acme@one", "acme@two") as namespace:
        await namespace.send_batch(messages)
        answers["namespace"] = await count(namespace)
    async with controlled_mailbox() as place:
        await place.mailbox.send_batch(messages)
        for name, rights in (("capability", ("*",)), ("limited capability", ("a.*",))):
            session = await place.control.open_session(place.issue(topics=rights))
            try:
                answers[name] = await count(session.mailbox)
            except Forbidden as refusal:
                answers[name] = refusal.code
    return answers


async def count(mailbox: Any, **options: int) -> int:
    """Call the operation, which type checkers do not see."""
    answer: int = await mailbox.count_topics(**options)
    return answer


def describe(address: str) -> Any:
    """Return what the server's OpenAPI document says of the operation."""
    with urlopen(f"{address}/openapi.json", timeout=10) as answer:
        return json.load(answer)["paths"]["/v1/topics/count"]["get"]


def in_threads(store: str) -> int:
    """Return the answer of a facade for threads that was written again from the port."""
    source = inspect.getsource(port)
    added = inspect.getsource(count_topics).replace("port.", "")
    end = source.index("\n\nOPERATIONS =")
    body = "\n".join(f"    {line}" for line in added.splitlines())
    written: dict[str, Any] = {}
    exec(make(f"{source[:end]}\n{body}\n{source[end:]}"), written)
    with connect(store) as mailbox:
        count: int = written["SyncOperations"].count_topics(mailbox, least=2)
    return count


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))))
