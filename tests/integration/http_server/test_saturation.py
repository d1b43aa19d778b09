"""Past saturation, calls are refused with a time to retry; none fails otherwise, and none hangs."""

import asyncio
import json
from collections import Counter
from pathlib import Path

from tests.support.servers.http import PostroomServer

CALLERS = 64
CALLS = 15
CAPACITY = 100
MESSAGES = 5


async def test_a_flood_is_refused_with_429_and_another_topic_is_served(tmp_path: Path) -> None:
    policy = {"shards": 1, "shard_capacity": CAPACITY}
    with PostroomServer(tmp_path, policy=policy) as server:

        async def call(topic: str, count: int, statuses: Counter[int]) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            body = json.dumps([{"topic": topic, "payload_b64": "QUJD"}] * MESSAGES).encode()
            head = b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            for _ in range(count):
                writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
                header = await reader.readuntil(b"\r\n\r\n")
                length = int(header.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
                for result in json.loads(await reader.readexactly(length))["results"]:
                    error = result.get("error")
                    statuses[error["status"] if error else 200] += 1
                    assert error is None or error["retry_after_ms"] > 0
            writer.close()
            await writer.wait_closed()

        noisy: Counter[int] = Counter()
        quiet: Counter[int] = Counter()
        async with asyncio.timeout(240):
            await asyncio.gather(
                *(call("noisy", CALLS, noisy) for _ in range(CALLERS)), call("quiet", CALLS, quiet)
            )
        assert noisy == {200: CAPACITY, 429: CALLERS * CALLS * MESSAGES - CAPACITY}
        assert quiet == {200: CALLS * MESSAGES}
        full = server.call("POST", "/v1/send", {"topic": "noisy", "payload_b64": ""})
        assert full.status == 429
        assert int(full.headers["retry-after"]) >= 1
        backlog = server.call("GET", "/v1/backlog").json["shards"]
        assert {each["topic"]: each["ready"] for each in backlog} == {
            "noisy": CAPACITY,
            "quiet": CALLS * MESSAGES,
        }
