"""`/mcp` of `postroom serve`: capabilities, web pages, bounds, and clients that leave."""

import asyncio
import json
import traceback
from typing import Any

import pytest
from aiohttp import ClientSession, TCPConnector

from tests.e2e.conftest import Postroom
from tests.e2e.mcp.conftest import READ, Agents
from tests.support.mcp import World, call, http_agent
from tests.support.servers.http import PostroomServer
from tests.support.waiting import SECONDS, until_answer, wait_until

HEADERS = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
MANY = 1_000


def request(tool: str = "list_topics", **arguments: Any) -> dict[str, Any]:
    """Return the body of a call, as clients of the first stateless revision of the protocol send it."""
    return {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "tools/call",
        "params": {"name": tool, "arguments": arguments},
    }


def test_a_request_without_a_valid_capability_is_refused_before_it_is_read(http_agents: Agents) -> None:
    token = http_agents.mint()
    with http_agents.server() as server:
        for headers in (
            {},
            {"Authorization": "Bearer junk"},
            {"Authorization": f"Bearer {token[:-6]}AAAAAA"},
            {"Authorization": "Basic YTpi"},
        ):
            refused = server.call("POST", "/mcp", b"{", HEADERS | headers)
            assert (refused.status, refused.json["error"]["data"]["code"]) == (401, "E_CAP_AUTH"), refused
            assert refused.headers["www-authenticate"] == "Bearer"
        answer = server.call("POST", "/mcp", request(), HEADERS | {"Authorization": f"Bearer {token}"})
        assert (answer.status, answer.json["result"]["isError"]) == (200, False)


def test_web_pages_other_hosts_methods_paths_and_large_bodies_are_refused(
    postroom: Postroom, world: World
) -> None:
    with PostroomServer(postroom.folder / "server", str(postroom.store)) as server:
        for method, path, headers, status in (
            ("POST", "/mcp", {"Origin": "https://evil.example"}, 403),
            ("POST", "/mcp", {"Origin": "null"}, 403),
            ("POST", "/mcp", {"Host": "evil.example"}, 421),
            ("GET", "/mcp", {"Origin": "https://evil.example"}, 403),
            ("GET", "/mcp", {}, 405),
            ("DELETE", "/mcp", {}, 405),
            ("POST", "/mcp/other", {}, 404),
            ("POST", "/mcp", {"Content-Type": "text/plain"}, 400),
            ("POST", "/mcp", {"Accept": "text/html"}, 406),
            ("POST", "/mcp", {"Content-Encoding": "gzip"}, 415),
        ):
            body = request() if method == "POST" else None
            refused = server.call(method, path, body, HEADERS | headers)
            assert refused.status == status, (method, path, headers, refused)
        large = server.call("POST", "/mcp", request(topic="x" * (1 << 20)), HEADERS)
        assert (large.status, large.json["error"]["data"]["code"]) == (413, "E_FRAME_TOO_LARGE")
        for junk in (b"", b"{", b"[]", b"[" * 100_000, b'{"jsonrpc": "2.0"}', b"\xff"):
            refused = server.call("POST", "/mcp", junk, HEADERS)
            assert refused.status == 400, (junk[:20], refused)
        assert server.call("POST", "/mcp", request(), HEADERS).status == 200
        own = {"Origin": server.address}
        assert server.call("POST", "/mcp", request(), HEADERS | own).status == 200


async def test_calls_beyond_the_limit_are_refused_in_words_and_the_others_are_answered(
    postroom: Postroom, world: World
) -> None:
    limits: dict[str, Any] = {"max_unauthenticated": 1_024, "max_unauthenticated_per_address": 1_024}
    tables = {"mcp": {"max_calls": 4}}
    with PostroomServer(postroom.folder / "server", str(postroom.store), tables=tables, **limits) as server:
        async with ClientSession(connector=TCPConnector(limit=MANY)) as client:

            async def ask() -> tuple[int, Any]:
                async with client.post(
                    f"{server.address}/mcp", json=request("list_consumers"), headers=HEADERS
                ) as answer:
                    assert answer.status == 200 or answer.headers["Retry-After"]
                    return answer.status, await answer.json(content_type=None)

            answers = await asyncio.gather(*(ask() for _ in range(MANY)))
            by_status = {status: [each for code, each in answers if code == status] for status in (200, 429)}
            assert len(by_status[200]) + len(by_status[429]) == MANY
            assert by_status[200]
            assert {each["error"]["message"] for each in by_status[429]} == {
                "The server answers 4 calls of agents at a time; retry shortly."
            }
            assert not any(each["result"]["isError"] for each in by_status[200])
            async with asyncio.timeout(SECONDS):  # a call ends shortly after its answer was sent
                while (await ask())[0] != 200:
                    await asyncio.sleep(0.01)


def test_clients_that_leave_make_room_at_once(postroom: Postroom, world: World) -> None:
    tables = {"mcp": {"max_calls": 1}}
    with PostroomServer(postroom.folder / "server", str(postroom.store), tables=tables) as server:
        body = json.dumps(request("report", report="traffic")).encode()
        lines = [
            b"POST /mcp HTTP/1.1",
            b"Host: localhost",
            *(f"{n}: {v}".encode() for n, v in HEADERS.items()),
        ]
        head = b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", b""])
        for cut in (len(head) // 2, len(head) + 5, len(head) + len(body)):
            with server.raw() as raw:
                raw.sendall((head + body)[:cut])
        wait_until(lambda: server.call("POST", "/mcp", request(), HEADERS).status == 200)


async def test_a_client_is_told_in_words_why_it_is_refused(http_agents: Agents) -> None:
    with http_agents.server() as server:
        with pytest.raises(ExceptionGroup) as refused:
            async with http_agent(server.address, "junk"):
                pass
        assert "capability" in "".join(traceback.format_exception(refused.value))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_agents_keep_nothing_in_the_server(http_agents: Agents, mode: str, world: World) -> None:
    token = http_agents.mint()
    with http_agents.server() as server:
        async with http_agent(server.address, token, mode) as agent:
            assert (await call(agent, "get_message", msg_id=world.orders))["topic"] == "orders"
        session = {"Mcp-Session-Id": "a" * 32, "Authorization": f"Bearer {token}"}
        answer = server.call("POST", "/mcp", request(), HEADERS | session)
        assert "mcp-session-id" not in answer.headers


async def test_a_capability_that_is_revoked_is_refused_between_two_calls_of_one_connection(
    http_agents: Agents, postroom: Postroom
) -> None:
    token = http_agents.mint(READ)
    with http_agents.server() as server:
        headers = HEADERS | {"Authorization": f"Bearer {token}"}
        async with ClientSession() as client:

            async def status() -> int:
                async with client.post(f"{server.address}/mcp", json=request(), headers=headers) as answer:
                    return answer.status

            assert await status() == 200
            postroom.ok("token", "revoke", "--principal", "agent")

            async def is_refused() -> bool:
                return await status() == 401

            await until_answer(is_refused)


def test_a_server_without_tools_for_agents_has_nothing_there(postroom: Postroom) -> None:
    with PostroomServer(postroom.folder / "server", str(postroom.store), mcp=False) as server:
        assert server.call("POST", "/mcp", request(), HEADERS).status == 404
