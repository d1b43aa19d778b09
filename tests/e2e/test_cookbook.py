"""The recipes of docs/cookbook do what they show: web.md, jobs.md, databases.md and kubernetes.md."""

import re
import shutil

import pytest

from tests.e2e.conftest import ROOT, Postroom
from tests.support.servers.postgres import PostgresServer
from tests.support.servers.process import free_port

COOKBOOK = ROOT / "docs" / "cookbook"


def read(name: str) -> str:
    return (COOKBOOK / name).read_text("utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_web_applications_webhooks_and_notebooks(postroom: Postroom) -> None:
    ports = {port: str(free_port()) for port in ("8000", "8001", "5000")}

    page = re.sub(r"(?<=[: ])(8000|8001|5000)\b", lambda port: ports[port[0]], read("web.md"))
    assert len(postroom.run_page(page)) == 13


def test_jobs(postroom: Postroom) -> None:
    assert len(postroom.run_page(read("jobs.md"))) == 15


def test_databases(postroom: Postroom, postgres_server: PostgresServer) -> None:
    shop, roles = (postgres_server.create_database() for _ in range(2))
    postroom.environment["PATH"] = f"{postgres_server.programs}:{postroom.environment['PATH']}"

    shop_page, roles_page = read("databases.md").split("## Roles in PostgreSQL")
    page = (
        shop_page.replace("//shop@db/shop", shop.removeprefix("postgresql:"))
        + "## "
        + roles_page.replace("//owner@db/shop", roles.removeprefix("postgresql:")).replace(
            "//shop@db/shop", roles.removeprefix("postgresql:").replace("postgres@", "shop@")
        )
    )
    assert len(postroom.run_page(page)) == 16


def test_kubernetes(postroom: Postroom) -> None:
    assert len(postroom.run_page(read("kubernetes.md"))) == 1


def test_the_index_names_every_recipe() -> None:
    index = (COOKBOOK / "index.md").read_text("utf-8")
    for page in COOKBOOK.glob("*.md"):
        titles = re.findall(r"^## (.+)$", page.read_text("utf-8"), re.MULTILINE)
        for title in titles:
            assert f"({page.name}#{title.lower().replace(' ', '-')})" in index, f"{page.name}: {title}"
