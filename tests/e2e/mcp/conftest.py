"""A store with read models, whose messages give orders to agents, and agents at it over each transport."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from mcp import Client

from tests.e2e.conftest import Postroom
from tests.support.mcp import World, http_agent, run_world, stdio_agent
from tests.support.servers.http import PostroomServer

READ = "read-headers,read-payload"


@pytest.fixture(scope="package")
def first_world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, World]:
    """A folder with the store of a world, which is made once."""
    postroom = Postroom(tmp_path_factory.mktemp("world"))
    made = run_world(str(postroom.store))
    postroom.ok("views", "rebuild")
    postroom.ok("token", "rotate")
    return postroom.folder, made


@pytest.fixture
def world(first_world: tuple[Path, World], postroom: Postroom) -> World:
    folder, made = first_world
    shutil.copytree(folder, postroom.folder, dirs_exist_ok=True)
    return made


class Agents:
    """Connects agents to the store of a world, over standard input or over HTTP, with the same settings."""

    def __init__(self, postroom: Postroom, transport: str) -> None:
        self.postroom = postroom
        self.transport = transport

    def mint(self, operations: str = READ, *options: str) -> str:
        """Return a new token."""
        return self.postroom.ok("token", "mint", "agent", "--operation", operations, *options).out.strip()

    @asynccontextmanager
    async def connect(
        self, operations: str = READ, *options: str, mode: str = "auto", **tables: Any
    ) -> AsyncIterator[Client]:
        """Yield an agent with a new token.

        Arguments:
            options: of `postroom token mint`.
            tables: sections of the settings.
        """
        token = self.mint(operations, *options)
        if self.transport == "stdio":
            lines = [
                f"[{section}]\n"
                + "\n".join(f"{name} = {json.dumps(value)}" for name, value in values.items())
                for section, values in tables.items()
            ]
            (self.postroom.folder / "postroom.toml").write_text("\n".join(lines))
            environment = self.postroom.environment | {"POSTROOM_TOKEN": token}
            async with stdio_agent(self.postroom.folder, environment=environment, mode=mode) as agent:
                yield agent
            return
        with self.server(**tables) as server:
            async with http_agent(server.address, token, mode) as agent:
                yield agent

    def server(self, **tables: Any) -> PostroomServer:
        """Return a server of the store that asks for tokens."""
        folder, store = self.postroom.folder / "server", str(self.postroom.store)
        return PostroomServer(folder, store, dev=False, tables=tables)


@pytest.fixture(params=["stdio", "http"])
def agents(request: pytest.FixtureRequest, postroom: Postroom, world: World) -> Agents:
    return Agents(postroom, request.param)


@pytest.fixture
def http_agents(postroom: Postroom, world: World) -> Agents:
    return Agents(postroom, "http")
