"""The service that docs/inbox.md shows is a service that works."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import psycopg
import uvicorn

from postroom.adapters.http.event_handler import HttpEventHandler
from tests.conformance.event_handler import request
from tests.support.waiting import until

PAGE = Path(__file__).parents[2] / "docs" / "inbox.md"
KEY = "0123456789abcdef0123456789abcdef"


async def test_the_handler_of_the_documentation_handles_events_once(
    messaging_database: str,
) -> None:
    with psycopg.connect(messaging_database) as connection:
        connection.execute("CREATE TABLE orders (id text PRIMARY KEY, total int)")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    code = "\n".join(blocks)
    for shown, real in (
        ("postgresql+psycopg://sea@db/sea", messaging_database.replace("postgresql:", "postgresql+psycopg:")),
        ('open("/run/secrets/postroom-signing-key").read()', f'"{KEY}"'),
    ):
        assert shown in code
        code = code.replace(shown, real)
    service: dict[str, Any] = {}
    exec(compile(code, "docs/inbox.md", "exec"), service)

    server = uvicorn.Server(uvicorn.Config(service["app"], host="127.0.0.1", port=0, log_level="critical"))
    thread = threading.Thread(target=server.run)
    thread.start()
    await until(lambda: server.started)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/"
    outcomes = []
    for keys in (["another key, of 32 bytes or so...."], [KEY], [KEY]):
        async with HttpEventHandler(f"{url}handle", allow=[f"{url} 127.0.0.0/8"], keys=keys) as handler:
            outcomes.append((await handler.handle(request(payload={"id": "o1", "total": 5}))).outcome)
    async with HttpEventHandler(f"{url}batch", allow=[f"{url} 127.0.0.0/8"], keys=[KEY], batch=10) as handler:
        orders = [{"id": "o1", "total": 5}, {"id": "o2", "total": 6}]
        calls = [handler.handle(request(n, payload=order)) for n, order in enumerate(orders, 1)]
        outcomes += [result.outcome for result in await asyncio.gather(*calls)]
    server.should_exit = True
    thread.join()
    assert outcomes == ["failed", *["processed"] * 4]
    with psycopg.connect(messaging_database) as connection:
        assert connection.execute("SELECT * FROM orders").fetchall() == [("o1", 5), ("o2", 6)]
        placed = connection.execute("SELECT event_type FROM outbox_events").fetchall()
        assert placed == [("order_placed",)] * 2
