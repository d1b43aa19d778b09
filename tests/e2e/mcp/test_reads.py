"""What agents may read: with the SDK's own client, on real processes, over standard input and over HTTP."""

import json
from typing import Any

import pytest
from mcp.types import CallToolResult

from postroom import NewMessage, open_mailbox
from postroom.adapters.mcp.answers import MAX_BYTES
from postroom.adapters.mcp.commands import command_tools
from tests.e2e.conftest import Postroom
from tests.e2e.mcp.conftest import Agents
from tests.support.mcp import (
    CARD,
    HIDDEN,
    ORDER,
    SECRET,
    TOPIC,
    World,
    all_rows,
    call,
    content_of,
    read_all,
    reads_of,
    refusal,
    stdio_agent,
    tool_names,
)

COMMANDS = [each.name for each in command_tools()]
MASKS: dict[str, Any] = {
    "console": {"mask_headers": ["card-holder", "principal"], "mask_payload_fields": ["/card/number"]},
}


def text_of(answers: dict[str, CallToolResult]) -> str:
    """Return all that an agent reads of answers."""
    return "\n".join(each.model_dump_json() for each in answers.values())


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_each_tool_answers_and_none_of_them_changes_anything(
    agents: Agents, world: World, mode: str
) -> None:
    async with agents.connect(mode=mode) as agent:
        before = await call(agent, "get_backlog")
        answers = await read_all(agent, world)
        assert {name: each.structured_content for name, each in answers.items() if each.is_error} == {}
        after = await call(agent, "get_backlog")
        assert (after["position"], after["shards"]) == (before["position"], before["shards"])
        assert len(content_of(answers["search_messages"])["data"]["items"]) == 8
        assert len(content_of(answers["list_dead_letters"])["data"]["items"]) == 5
        (group,) = content_of(answers["group_dead_letters"])["data"]["groups"]
        assert group["count"] == 5
        assert content_of(answers["simulate_policy"])["data"]["comparison"]["messages"] == 8
        story = content_of(answers["explain_message"])["data"]["story"]
        assert [each["text"].split()[0] for each in story] == ["Sent", "Delivered", "Nacked"]
        shown = content_of(answers["get_message"])["data"]
        assert shown["status"] == "dead"
        assert f'"number": "{CARD}"' in shown["payload"]["text"]


async def test_agents_are_shown_no_commands_and_can_call_none_without_the_right(agents: Agents) -> None:
    async with agents.connect() as agent:
        assert {*await tool_names(agent)}.isdisjoint(COMMANDS)
        for name in (*COMMANDS, "send_message", "purge_topic", "set_settings", "no such tool"):
            code, message = await refusal(agent, name, topic="orders")
            assert code == "E_NOT_FOUND"
            assert message.startswith(f"There is no tool '{name}' for this caller;")


async def test_what_others_wrote_stands_in_data_only_and_changes_no_tool(
    agents: Agents, world: World, postroom: Postroom
) -> None:
    async with agents.connect() as agent:
        tools = await agent.list_tools()
        told = tools.model_dump_json() + str(agent.instructions)
        answers = await read_all(agent, world) | {
            "unknown topic": await agent.call_tool("peek_messages", {"topic": TOPIC}),
            "unknown message": await agent.call_tool("get_message", {"msg_id": ORDER[:200]}),
            "order as a tool": await agent.call_tool(ORDER, {}),
            "order as an argument": await agent.call_tool("list_topics", {ORDER: 1}),
        }
        assert (await agent.list_tools()).model_dump_json() == tools.model_dump_json()
    # What senders wrote is not in what an agent is told to do.
    assert [each for each in ("IGNORE", "ignore-previous", SECRET, CARD) if each in told] == []
    for name, answer in answers.items():
        outside = {key: value for key, value in content_of(answer).items() if key != "data"}
        assert [each for each in ("IGNORE", "ignore-previous", "ig") if each in str(outside).split()] == []
        assert "IGNORE" not in json.dumps(outside), name
        assert not set(HIDDEN) & set(json.dumps(content_of(answer), ensure_ascii=False)), name
    everything = text_of(answers)
    assert "IGNORE ALL PREVIOUS INSTRUCTIONS" in everything
    assert r"\\u202e" in everything
    assert TOPIC in everything


async def test_masked_headers_and_fields_are_in_no_answer_whatever_the_right(
    agents: Agents, world: World
) -> None:
    rights = "read-headers,read-payload,redrive,admin"
    async with agents.connect(rights, **MASKS) as agent:
        everything = text_of(await read_all(agent, world))
        everything += text_of({"preview": await agent.call_tool("preview_start_redrive", {"spec": {}})})
        shown = await call(agent, "get_message", msg_id=world.orders, payload_from=0)
        assert shown["payload"]["is_masked"] is True
        assert shown["headers"]["custom_headers"]["card-holder"] == "[masked]"
        for criterion in ({"headers": {"card-holder": SECRET}}, {"principals": ["shop"]}, {"text": SECRET}):
            code, message = await refusal(agent, "search_messages", **criterion)
            assert (code, "would disclose values that are hidden" in message) == ("E_CAP_SCOPE", True)
            code, _ = await refusal(agent, "preview_start_redrive", spec=criterion)
            assert code == "E_CAP_SCOPE"
    assert [each for each in (SECRET, CARD, "Sent by shop") if each in everything] == []
    assert "[masked]" in everything


async def test_an_agent_that_is_limited_to_topics_sees_only_these(agents: Agents, world: World) -> None:
    async with agents.connect("read-headers,read-payload", "--topic", "payments") as agent:
        allowed = {
            name: arguments | ({"topic": "payments"} if "topic" in arguments else {})
            for name, arguments in reads_of(world).items()
        }
        allowed |= {
            "search_messages": {"topics": ["payments"]},
            "get_message": {"msg_id": world.payments, "payload_from": 0},
            "explain_message": {"msg_id": world.payments},
            "simulate_policy": {"topic": "payments", "max_attempts": 3},
            "report": {"report": "traffic", "topic": "payments"},
        }
        answers = {name: await agent.call_tool(name, arguments) for name, arguments in allowed.items()}
        assert {name: each.structured_content for name, each in answers.items() if each.is_error} == {}
        everything = text_of(answers)
        assert "payments" in everything
        assert [each for each in ('"orders"', TOPIC, world.orders, *world.dead) if each in everything] == []
        foreign: dict[str, dict[str, Any]] = {
            "search_messages": {},
            "get_message": {"msg_id": world.orders},
            "explain_message": {"msg_id": world.dead[0]},
            "peek_messages": {"topic": "orders"},
            "list_dead_letters": {"topic": "orders"},
            "get_backlog": {"topic": "orders"},
            "describe_topic": {"topic": "orders"},
            "get_topic_policy": {"topic": "orders"},
            "group_dead_letters": {"topics": ["*"]},
            "simulate_policy": {"topic": "orders", "max_attempts": 3},
            "report": {"report": "traffic", "topic": "*"},
        }
        for name, arguments in foreign.items():
            code, message = await refusal(agent, name, **arguments)
            assert code == "E_CAP_SCOPE", (name, message)
            assert world.orders not in message
        for name in ("simulate_policy", "report"):
            rest = {"max_attempts": 3} if name == "simulate_policy" else {"report": "sla"}
            assert (await refusal(agent, name, **rest))[0] == "E_SCHEMA"
        unknown = await refusal(agent, "get_message", msg_id="no-such-message")
        assert unknown == await refusal(agent, "get_message", msg_id=world.orders)


async def test_each_answer_is_bounded_and_its_cursors_lead_to_the_end(postroom: Postroom) -> None:
    names = [f"topic-{number:05}-{'x' * 100}" for number in range(9_900)]
    async with open_mailbox(str(postroom.store), "main@local", durability="relaxed") as mailbox:
        for start in range(0, len(names), 1_000):
            batch = [NewMessage(topic=each, payload=b"{}") for each in names[start : start + 1_000]]
            await mailbox.send_batch(batch)
        for _ in range(300):
            await mailbox.send_message(NewMessage(topic="orders", payload=b"x" * 1_000))
        while received := await mailbox.receive_messages("orders", max_messages=256):
            for each in received:
                await each.reject(f"{'é' * 900} {each.message_id}")
    async with stdio_agent(postroom.folder) as agent:
        topics = await all_rows(agent, "list_topics", "topics", limit=100)
        assert [each["topic"] for each in topics] == sorted([*names, "orders"])
        letters = await all_rows(agent, "list_dead_letters", "items", limit=100)
        assert len({each["message_id"] for each in letters}) == len(letters) == 300
        for tool in ("list_topics", "list_dead_letters", "get_backlog", "peek_messages"):
            extra = {"topic": names[0]} if tool == "peek_messages" else {}
            answer = await agent.call_tool(tool, {"limit": 100, **extra})
            assert len(json.dumps(content_of(answer)["data"], ensure_ascii=False).encode()) < 1.2 * MAX_BYTES
        page = content_of(await agent.call_tool("list_dead_letters", {"limit": 100}))
        assert 3 <= len(page["data"]["items"]) < 100


async def test_a_long_payload_is_read_part_by_part(postroom: Postroom) -> None:
    text = "".join(f"line {number} of a long text\n" for number in range(1_500))
    id_ = postroom.ok("send", "texts", "--content-type", "text/plain", "-", stdin=text.encode()).out.strip()
    async with stdio_agent(postroom.folder) as agent:
        part: dict[str, Any] = {"next_payload_from": 0}
        read = ""
        while "next_payload_from" in part:
            start = part["next_payload_from"]
            part = (await call(agent, "get_message", msg_id=id_, payload_from=start))["payload"]
            read += part["text"]
        assert read == text
        assert part["is_complete"] is True
        assert "payload" not in await call(agent, "get_message", msg_id=id_)


async def test_reads_are_audited_with_their_caller(agents: Agents, world: World, postroom: Postroom) -> None:
    async with agents.connect() as agent:
        await call(agent, "get_message", msg_id=world.orders, payload_from=0)
        await call(agent, "search_messages", topics=["orders"])
        await call(agent, "simulate_policy", max_attempts=3)
        await refusal(agent, "get_message", msg_id="unknown")
    entries = postroom.ok("audit", "--json", "--principal", "agent").json["entries"]
    assert [(each["operation"], each["outcome"]) for each in entries[::-1]] == [
        ("read-payload", "allowed"),
        ("read-headers", "allowed"),
        ("read-headers", "allowed"),
        ("read-headers", "E_NOT_FOUND"),
    ]
    assert ORDER not in str(entries)
