"""Commands of agents: with a right, after a preview, and only if what they change is what it showed."""

import json
from typing import Any

import pytest
from mcp import Client

from postroom import open_mailbox
from tests.e2e.conftest import Postroom
from tests.e2e.mcp.conftest import READ, Agents
from tests.support.mcp import World, call, content_of, http_agent, refusal, stdio_agent, tool_names
from tests.support.servers.http import PostroomServer
from tests.support.waiting import until_answer

REDRIVE = ["preview_start_redrive", "start_redrive", "preview_change_redrive", "change_redrive"]
CANCEL = ["preview_cancel_messages", "cancel_messages"]
PAUSE = ["preview_pause_topic", "pause_topic", "preview_resume_topic", "resume_topic"]
ALL = f"{READ},redrive,admin"


async def preview(agent: Client, tool: str, **arguments: Any) -> str:
    """Return the confirm of a preview."""
    answer = await agent.call_tool(f"preview_{tool}", arguments)
    assert not answer.is_error, answer.structured_content
    confirm: str = content_of(answer)["confirm"]
    return confirm


async def counts(agent: Client, topic: str) -> dict[str, int]:
    """Return the messages of a topic by state."""
    shards = (await call(agent, "get_backlog", topic=topic))["shards"]
    return {name: sum(each[name] for each in shards) for name in ("ready", "in_flight", "dead")}


async def until_ended(agent: Client, job_id: str) -> dict[str, Any]:
    """Return a job when it has ended."""

    async def has_ended() -> bool:
        return bool((await call(agent, "get_redrive", job_id=job_id))["status"] != "running")

    await until_answer(has_ended)
    return await call(agent, "get_redrive", job_id=job_id)


@pytest.mark.parametrize(
    ("rights", "tools"),
    [
        (READ, []),
        (f"{READ},redrive", REDRIVE),
        (f"{READ},admin", CANCEL + PAUSE),
        (ALL, REDRIVE + CANCEL + PAUSE),
    ],
)
async def test_a_capability_has_the_commands_that_it_permits(
    http_agents: Agents, rights: str, tools: list[str]
) -> None:
    async with http_agents.connect(rights) as agent:
        shown = (await agent.list_tools()).tools
        names = [each.name for each in shown]
        assert [each for each in names if each in REDRIVE + CANCEL + PAUSE] == tools
        for each in shown:
            is_command = each.name in tools and not each.name.startswith("preview_")
            assert each.annotations is not None
            assert each.annotations.read_only_hint is not is_command
            assert each.annotations.destructive_hint is is_command


async def test_the_user_of_this_machine_gives_an_agent_no_command_unless_it_is_allowed(
    postroom: Postroom, world: World
) -> None:
    for options, tools in (
        ([], []),
        (["--allow", "redrive"], REDRIVE),
        (["--allow", "pause"], PAUSE),
        (["--allow", "cancel, redrive"], REDRIVE + CANCEL),
    ):
        async with stdio_agent(postroom.folder, *options) as agent:
            names = await tool_names(agent)
            assert [each for each in names if each in REDRIVE + CANCEL + PAUSE] == tools
            assert ("get_redrive" in names) is (REDRIVE[0] in tools)
    refused = postroom("mcp", "--allow", "redrive,purge")
    assert refused.code != 0
    assert "there are no commands 'purge'; allow some of redrive, cancel, pause" in refused.err


async def test_settings_narrow_what_a_capability_permits(http_agents: Agents) -> None:
    async with http_agents.connect(ALL, mcp={"allow": ["pause"]}) as agent:
        assert [each for each in await tool_names(agent) if each in REDRIVE + CANCEL + PAUSE] == PAUSE
        assert (await refusal(agent, "preview_cancel_messages", ids=["x"]))[0] == "E_NOT_FOUND"


async def test_a_server_without_tokens_has_commands_only_if_its_settings_say_so(
    postroom: Postroom, world: World
) -> None:
    for tables, tools in ({}, []), ({"mcp": {"allow": ["pause"]}}, PAUSE):
        with PostroomServer(postroom.folder / "server", str(postroom.store), tables=tables) as server:
            async with http_agent(server.address) as agent:
                names = await tool_names(agent)
                assert [each for each in names if each in REDRIVE + CANCEL + PAUSE] == tools


async def test_a_confirmed_job_redrives_what_its_preview_showed_and_a_second_confirm_starts_none(
    agents: Agents, world: World
) -> None:
    async with agents.connect(ALL) as agent:
        spec = {"topics": ["orders"], "rate": 1}
        answer = content_of(await agent.call_tool("preview_start_redrive", {"spec": spec}))
        assert answer["data"]["matched"] == 5
        assert await counts(agent, "orders") == {"ready": 1, "in_flight": 0, "dead": 5}
        confirmed = {"spec": spec, "confirm": answer["confirm"]}
        job = (await call(agent, "start_redrive", **confirmed))["result"]
        assert (job["matched"], job["principal"]) == (5, "agent")
        again = await agent.call_tool("start_redrive", confirmed)
        if again.is_error:  # it has begun to redrive
            assert content_of(again)["code"] == "E_STALE_PREVIEW"
        assert len((await call(agent, "list_redrives"))["jobs"]) == 1
        change = {"job_id": job["job_id"], "action": "cancel"}
        confirm = await preview(agent, "change_redrive", **change)
        assert (await call(agent, "change_redrive", **change, confirm=confirm))["result"]["status"] == (
            "cancelled"
        )
        code, _ = await refusal(agent, "change_redrive", **change, confirm=confirm)
        assert code == "E_STALE_PREVIEW"


async def test_what_dies_after_a_preview_is_not_redriven_and_does_not_spoil_it(
    postroom: Postroom, world: World
) -> None:
    async with stdio_agent(postroom.folder, "--allow", "redrive") as agent:
        spec = {"topics": ["orders"]}
        confirm = await preview(agent, "start_redrive", spec=spec)
        (received,) = postroom.ok("recv", "orders", "--json").lines
        postroom.ok("nack", received["receipt"], "--reason", "late")
        assert (await counts(agent, "orders"))["dead"] == 6
        job = (await call(agent, "start_redrive", spec=spec, confirm=confirm))["result"]
        assert (await until_ended(agent, job["job_id"]))["moved"] == 5
        assert await counts(agent, "orders") == {"ready": 5, "in_flight": 0, "dead": 1}


async def test_a_redrive_whose_selection_has_changed_is_refused_and_changes_nothing(
    postroom: Postroom, world: World
) -> None:
    async with stdio_agent(postroom.folder, "--allow", "redrive") as agent:
        confirm = await preview(agent, "start_redrive", spec={})
        # As many are dead as before, of the same error: one was redriven, and died again.
        postroom.ok("dlq", "redrive", "orders", "--id", world.dead[2])
        code, message = await refusal(agent, "start_redrive", spec={}, confirm=confirm)
        assert code == "E_STALE_PREVIEW"
        assert message.endswith("nothing was changed; preview it again.")
        assert (await call(agent, "list_redrives"))["jobs"] == []
        assert (await counts(agent, "orders"))["dead"] == 4


async def test_a_cancellation_of_messages_that_were_delivered_meanwhile_is_refused(
    agents: Agents, world: World, postroom: Postroom
) -> None:
    async with agents.connect(ALL) as agent:
        ids = [world.orders, world.payments, "unknown"]
        confirm = await preview(agent, "cancel_messages", ids=ids)
        if agents.transport == "stdio":
            (received,) = postroom.ok("recv", "payments", "--json").lines
            code, _ = await refusal(agent, "cancel_messages", ids=ids, confirm=confirm)
            assert code == "E_STALE_PREVIEW"
            postroom.ok("ack", received["receipt"])
            confirm = await preview(agent, "cancel_messages", ids=ids)
        changes = (await call(agent, "cancel_messages", ids=ids, confirm=confirm))["result"]
        outcome = "settled" if agents.transport == "stdio" else "changed"
        assert [each["outcome"] for each in changes] == ["changed", outcome, "unknown"]
        assert (await refusal(agent, "cancel_messages", ids=ids, confirm=confirm))[0] == "E_STALE_PREVIEW"


async def test_a_pause_of_a_topic_that_was_paused_meanwhile_is_refused(
    postroom: Postroom, world: World
) -> None:
    async with stdio_agent(postroom.folder, "--allow", "pause") as agent:
        confirm = await preview(agent, "pause_topic", topic="orders")
        postroom.ok("topic", "pause", "orders")
        code, _ = await refusal(agent, "pause_topic", topic="orders", confirm=confirm)
        assert code == "E_STALE_PREVIEW"
        confirm = await preview(agent, "resume_topic", topic="orders")
        await call(agent, "resume_topic", topic="orders", confirm=confirm)
        assert (await call(agent, "get_backlog"))["paused_topics"] == []


async def test_a_confirm_is_of_one_caller_one_command_and_its_arguments(http_agents: Agents) -> None:
    first, second = (http_agents.mint(ALL) for _ in range(2))
    with http_agents.server() as server:
        async with http_agent(server.address, first) as agent, http_agent(server.address, second) as other:
            confirm = await preview(agent, "pause_topic", topic="orders")
            for caller, tool, topic, text in (
                (other, "pause_topic", "orders", confirm),
                (agent, "resume_topic", "orders", confirm),
                (agent, "pause_topic", "payments", confirm),
                (agent, "pause_topic", "orders", confirm[:-4] + "AAAA"),
                (agent, "pause_topic", "orders", "A" * len(confirm)),
                (agent, "pause_topic", "orders", "é"),
            ):
                code, message = await refusal(caller, tool, topic=topic, confirm=text)
                assert code in ("E_SCHEMA", "E_STALE_PREVIEW"), message
            assert (await call(agent, "get_backlog"))["paused_topics"] == []
            await call(agent, "pause_topic", topic="orders", confirm=confirm)
            assert (await call(other, "get_backlog"))["paused_topics"] == ["orders"]


async def test_a_preview_is_confirmed_by_another_process_with_the_keys_of_the_store(
    http_agents: Agents, postroom: Postroom
) -> None:
    token = http_agents.mint(ALL)
    environment = postroom.environment | {"POSTROOM_TOKEN": token}
    with http_agents.server() as server:
        async with http_agent(server.address, token) as agent:
            confirm = await preview(agent, "pause_topic", topic="orders")
    async with stdio_agent(postroom.folder, environment=environment) as agent:  # after a restart
        postroom.ok("token", "rotate")
        await call(agent, "pause_topic", topic="orders", confirm=confirm)
        assert (await call(agent, "get_backlog"))["paused_topics"] == ["orders"]
        confirm = await preview(agent, "resume_topic", topic="orders")
    other = {"POSTROOM_TOKEN": http_agents.mint(ALL)}
    async with stdio_agent(postroom.folder, environment=postroom.environment | other) as agent:
        assert (await refusal(agent, "resume_topic", topic="orders", confirm=confirm))[0] == "E_SCHEMA"
    with http_agents.server() as server:
        async with http_agent(server.address, token) as agent:
            await call(agent, "resume_topic", topic="orders", confirm=confirm)


async def test_the_user_of_this_machine_confirms_a_preview_of_another_process_once_the_store_has_keys(
    postroom: Postroom, world: World
) -> None:
    async with stdio_agent(postroom.folder, "--allow", "pause") as agent:
        confirm = await preview(agent, "pause_topic", topic="orders")
    async with stdio_agent(postroom.folder, "--allow", "pause") as agent:
        await call(agent, "pause_topic", topic="orders", confirm=confirm)
        confirm = await preview(agent, "resume_topic", topic="orders")
    (postroom.folder / "postroom.db.keys").unlink()
    async with stdio_agent(postroom.folder, "--allow", "pause") as agent:
        assert (await refusal(agent, "resume_topic", topic="orders", confirm=confirm))[0] == "E_SCHEMA"
        confirm = await preview(agent, "resume_topic", topic="orders")
        await call(agent, "resume_topic", topic="orders", confirm=confirm)


async def test_agents_start_no_jobs_that_remove_messages_or_send_copies(agents: Agents) -> None:
    async with agents.connect(ALL) as agent:
        for action in ("purge", "archive", "cancel", "reschedule"):
            spec = {"action": action} | ({"delay_ms": 1} if action == "reschedule" else {})
            code, message = await refusal(agent, "preview_start_redrive", spec=spec)
            assert (code, message) == (
                "E_CAP_SCOPE",
                f"Agents start jobs that redrive, not jobs that {action}.",
            )
        copies = {"topics": ["orders"], "destination": "elsewhere"}
        assert (await refusal(agent, "preview_start_redrive", spec=copies))[0] == "E_CAP_SCOPE"


async def test_what_messages_say_is_not_done(postroom: Postroom, world: World) -> None:
    """An agent that reads everything, with every command at hand, has changed nothing by reading."""
    async with open_mailbox(str(postroom.store), "main@local") as mailbox:
        before = (await mailbox.get_backlog()).shards
    async with stdio_agent(postroom.folder, "--allow", "redrive,cancel,pause") as agent:
        shown = json.dumps(await call(agent, "get_message", msg_id=world.hostile, payload_from=0))
        assert "cancel_messages" in shown
        for tool, arguments in (
            ("preview_start_redrive", {"spec": {}}),
            ("preview_cancel_messages", {"ids": [world.hostile]}),
            ("preview_pause_topic", {"topic": "orders"}),
        ):
            content = content_of(await agent.call_tool(tool, arguments))
            assert "IGNORE" not in json.dumps({**content, "data": None})
    async with open_mailbox(str(postroom.store), "main@local") as mailbox:
        assert (await mailbox.get_backlog()).shards == before
        assert await mailbox.list_redrives() == []
