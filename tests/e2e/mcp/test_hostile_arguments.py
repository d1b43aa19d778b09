"""Arguments of every type and size, in every argument of every tool."""

from collections.abc import Iterator
from typing import Any

from mcp import Client
from mcp.types import Tool

from tests.e2e.mcp.conftest import Agents
from tests.support.mcp import call, content_of

ALL = "read-headers,read-payload,redrive,admin"
VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**63,
    -(2**80),
    1.5,
    "",
    "x" * 10_000,
    "\0",
    "\u202e",
    "'; DROP TABLE messages; --",
    "2026-01-01T00:00:00",
    "9999-12-31T23:59:59Z",
    [],
    ["x"] * 1_001,
    [None],
    {"": ""},
    {"x": {"x": "x"}},
    {"topics": ["*"] * 101},
]


def attempts(tool: Tool, values: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield arguments of a tool, of which one is hostile."""
    properties = tool.input_schema["properties"]
    valid = {
        "topic": "orders",
        "msg_id": "x",
        "report": "traffic",
        "spec": {},
        "ids": ["x"],
        "action": "undo",
    }
    valid |= {"job_id": "0199d2c4-6f00-7a10-8c21-3b5b0f6f9e01", "confirm": "x"}
    base = {name: valid[name] for name in tool.input_schema.get("required", ())}
    for name in properties:
        for value in values:
            yield base | {name: value}
    yield {"no_such_argument": 1}
    yield {"\u202e": 1}


async def attack(agent: Client, values: list[Any]) -> int:
    """Call every tool with all attempts; return their number."""
    count = 0
    for tool in (await agent.list_tools()).tools:
        for arguments in attempts(tool, values):
            answer = await agent.call_tool(tool.name, arguments)
            content = content_of(answer)
            count += 1
            if answer.is_error:
                assert content["code"] not in ("E_INTERNAL", "E_DEFECT"), (tool.name, arguments, content)
                assert content["data"]["message"].endswith("."), (tool.name, arguments, content)
                assert len(content["data"]["message"]) < 1_000, (tool.name, arguments)
    return count


async def test_arguments_of_every_type_get_an_answer_or_a_sentence_and_change_nothing(
    agents: Agents,
) -> None:
    async with agents.connect(ALL) as agent:
        before = await call(agent, "get_backlog")
        # What a tool makes of its arguments does not depend on the transport.
        assert await attack(agent, VALUES if agents.transport == "stdio" else VALUES[::4]) > 300
        after = await call(agent, "get_backlog")
        assert (after["position"], after["shards"], after["paused_topics"]) == (
            before["position"],
            before["shards"],
            before["paused_topics"],
        )
