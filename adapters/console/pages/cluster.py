"""The cluster: leases, routes, runners and proxies; and the outbox and inbox of contexts."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from starlette.responses import Response

from postroom.adapters.console.page import NavEntry, Page, route
from postroom.application.ports.control_plane import LeaseAdmin, LeaseSummary, Member
from postroom.application.ports.read_models import ContextBacklog
from postroom.domain.capability.rights import Right
from postroom.domain.errors import PostroomError
from postroom.domain.lease.routing import Route

SECONDS = 3.0
"""How long a page waits for an admin."""
BADGES = {"active": "good", "expiring": "warn", "released": "neutral", "expired": "bad"}


class Cluster(NamedTuple):
    """The state of a cluster, as an admin reports it."""

    leases: Sequence[LeaseSummary]
    routes: Sequence[Route]
    members: Sequence[Member]


async def show_cluster(page: Page) -> Response:
    """Show the leases, routes and members of the cluster, and the backlogs of contexts."""
    page.require_all(Right.ADMIN)
    cluster, problem = None, None
    if page.data.control_plane is not None:
        try:
            async with asyncio.timeout(SECONDS):
                cluster = await _ask(page.data.control_plane)
        except PostroomError as error:
            problem = str(error)
        except TimeoutError:
            problem = f"No admin of the cluster answered within {SECONDS:.0f} s."
    return await page.render(
        "cluster.html",
        cluster=cluster,
        problem=problem,
        contexts=await _contexts(page),
        badges=BADGES,
    )


async def _ask(control_plane: LeaseAdmin) -> Cluster:
    leases, table, members = await asyncio.gather(
        control_plane.list_leases(), control_plane.list_routes(), control_plane.list_members()
    )
    return Cluster(leases, table.routes, members)


async def _contexts(page: Page) -> Sequence[ContextBacklog]:
    models = page.data.read_models
    return () if models is None else await page.blocking(models.contexts)


ROUTES = [route("/cluster", show_cluster)]
NAV = NavEntry("Cluster", "/cluster", 70, Right.ADMIN, group="Operations", key="k", all_topics=True)
