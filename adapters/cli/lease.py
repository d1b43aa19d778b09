"""`postroom lease` and `postroom route`: the leases and routes of a cluster, by way of its admins."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import msgspec
from typer import Argument, Option

from postroom.adapters.cli.cluster_settings import DEFAULT_ADMIN, ClusterSettings
from postroom.adapters.cli.session import Session
from postroom.adapters.cli.tables import Id, Time
from postroom.adapters.cli.values import exact_duration, format_duration
from postroom.adapters.compose.admin import LeaseAdmin
from postroom.adapters.compose.cluster import check_admins, connect_control_plane
from postroom.domain.errors import InvalidRequest, NotFound
from postroom.domain.names import check_mailbox, describe_choices

ENDED = ("released", "expired")

Admin = Annotated[
    str | None,
    Option(
        "--admin", metavar="HOST:PORT,...", help=f"Admins to ask; default {DEFAULT_ADMIN}. [cluster.admin]"
    ),
]


async def list_leases(session: Session, admin: Admin = None) -> None:
    """List the leases of the mailboxes of a cluster, also those that ended."""
    async with _connect(session, admin) as control_plane:
        leases = await control_plane.list_leases()
    if session.out.as_json:
        session.out.json({"leases": leases})
        return
    session.out.table(
        (
            "mailbox", "runner", "status", "epoch", "remaining", "renewed", "health", "partition", "address",
            "ttl", "grace", "events", "queries", "bytes",
        ),
        [
            (
                Id(each.mailbox),
                each.runner,
                each.status,
                each.epoch,
                None if each.status in ENDED else _signed_duration(each.remaining_ms),
                Time(each.renewed_at),
                each.health or None,
                each.partition,
                Id(each.address),
                exact_duration(each.ttl_ms),
                exact_duration(each.grace_ms),
                each.events_stored,
                each.queries_served,
                each.storage_size_bytes,
            )
            for each in leases
        ],
        only_wide=("partition", "address", "ttl", "grace", "events", "queries", "bytes"),
    )  # fmt: skip


async def release(
    session: Session,
    mailbox: Annotated[str, Argument(metavar="NAME@PROXY", help="Mailbox whose lease to release.")],
    force: Annotated[
        bool,
        Option(
            "--force", help="Release it although its runner renews it; that runner stops serving the mailbox."
        ),
    ] = False,
    admin: Admin = None,
) -> None:
    """Release the lease of a mailbox, so that another runner may acquire it at once.

    Without --force, only a lease in its grace period is released: its runner did not renew it in time.
    """
    name = check_mailbox(mailbox)
    async with _connect(session, admin) as control_plane:
        leases = {each.mailbox: each for each in await control_plane.list_leases()}
        lease = leases.get(name)
        if lease is None:
            raise NotFound(f"Mailbox {name} has no lease; {describe_choices(name, leases)}")
        if lease.status in ENDED:
            raise NotFound(f"The lease of {name} has ended already: it was {lease.status}.")
        if lease.status == "active" and not force:
            raise InvalidRequest(
                f"Runner {lease.runner} has the lease of {name} and renews it; stop it, or use --force."
            )
        await control_plane.release_lease(name, lease.runner, lease.epoch)
    session.out.result(
        {"mailbox": name, "runner": lease.runner, "epoch": lease.epoch},
        f"Released the lease of {name} of runner {lease.runner}.",
    )


async def list_routes(session: Session, admin: Admin = None) -> None:
    """List the routes to the runners of mailboxes."""
    async with _connect(session, admin) as control_plane:
        table = await control_plane.list_routes()
    if session.out.as_json:
        session.out.json(msgspec.to_builtins(table))
        return
    session.out.table(
        ("mailbox", "proxy", "runner", "address", "partition", "epoch", "position"),
        [
            (
                Id(each.mailbox),
                each.proxy,
                each.runner,
                Id(each.address),
                each.partition,
                each.epoch,
                each.position,
            )
            for each in table.routes
        ],
        only_wide=("position",),
    )


@asynccontextmanager
async def open_control_plane(session: Session) -> AsyncIterator[LeaseAdmin | None]:
    """Use the control plane of the cluster of the settings; yields None without a section `[cluster]`."""
    if not session.settings.sections.get("cluster"):
        yield None
        return
    async with _connect(session, None) as control_plane:
        yield control_plane


@asynccontextmanager
async def _connect(session: Session, admin: str | None) -> AsyncIterator[LeaseAdmin]:
    """Use the admins of an option or of the settings."""
    settings = session.settings.section("cluster", ClusterSettings, {"admin": admin})
    async with connect_control_plane(check_admins(settings.admin), settings.access()) as control_plane:
        yield control_plane


def _signed_duration(ms: int) -> str:
    return f"-{format_duration(-ms)}" if ms < 0 else format_duration(ms)
