"""Redrive jobs over HTTP and gRPC: what one client starts, another pauses, resumes and undoes."""

from collections.abc import AsyncIterator

import pytest

from postroom.adapters.compose import open_mailbox
from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.serve import (
    HttpSettings,
    open_grpc_surface,
    open_http_surface,
    serve_mailbox,
    unrestricted,
)
from postroom.application.messages import NewMessage
from postroom.application.operations.mailbox import Mailbox
from postroom.domain.errors import InvalidRequest
from postroom.domain.redrive.spec import RedriveSpec
from tests.support.redrives import CANCEL, EVERY_FIELD, FULL, RESCHEDULE, add_dead_letters
from tests.support.stores import MAILBOX
from tests.support.waiting import until_answer

Clients = tuple[Mailbox, Mailbox]
JOB = "01890a5d-ac96-774b-bcce-b302099a8057"
TIMEOUT_MS = 60_000


@pytest.fixture(params=["http", "grpc"])
async def clients(request: pytest.FixtureRequest) -> AsyncIterator[Clients]:
    """Return clients of one mailbox over HTTP and gRPC, in either order, and three dead letters."""
    address = "127.0.0.1:0"
    surfaces = [open_http_surface(address, HttpSettings()), open_grpc_surface(address)]
    async with open_mailbox("memory:", MAILBOX) as owned:
        await owned.set_topic_policy("orders", FULL)
        await add_dead_letters(owned, ["a", "b", "c"])
        async with (
            serve_mailbox("memory:", owned, surfaces, access=unrestricted) as (over_http, over_grpc),
            connect_remote(over_http, timeout_ms=TIMEOUT_MS) as by_http,
            connect_remote(over_grpc, timeout_ms=TIMEOUT_MS) as by_grpc,
        ):
            yield (by_http, by_grpc) if request.param == "http" else (by_grpc, by_http)


async def test_a_job_is_the_same_over_both(clients: Clients) -> None:
    one, other = clients
    for number in range(9):
        await one.send_message(NewMessage(topic="orders", payload=b"x", message_id=f"r{number}"))
    spec = RedriveSpec(topics=("orders",))
    assert (await one.preview_redrive(spec)).matched == 3
    job = await one.start_redrive(spec)
    assert await other.get_redrive(job.job_id) == job
    assert (await other.change_redrive(job.job_id, "pause")).status == "paused"
    for each in await one.receive_messages("orders", max_messages=9):
        await (each.nack(reason="late") if each.message_id == "r0" else each.ack())
    await one.change_redrive(job.job_id, "resume")
    await _until_idle(other, job.job_id)
    assert [each.message_id for each in (await other.list_dead_letters("orders")).items] == ["r0"]
    assert len(await one.receive_messages("orders", max_messages=1)) == 1
    await other.change_redrive(job.job_id, "undo")
    await _until_idle(one, job.job_id)
    report = await one.get_redrive(job.job_id)
    assert (report.status, report.moved, report.restored, report.retained) == ("undone", 3, 2, 1)
    for mailbox in clients:
        with pytest.raises(InvalidRequest, match="is undone, so it can't cancel"):
            await mailbox.change_redrive(job.job_id, "cancel")


async def test_a_selection_by_every_field_is_the_same_over_both(clients: Clients) -> None:
    one, other = clients
    assert (await one.preview_redrive(EVERY_FIELD)).matched == 0
    job = await one.start_redrive(EVERY_FIELD, job_id=JOB)
    assert job.spec == EVERY_FIELD
    assert (await other.start_redrive(EVERY_FIELD, job_id=JOB)).spec == EVERY_FIELD
    (listed,) = await other.list_redrives()
    assert listed.spec == EVERY_FIELD
    others = [RedriveSpec(action=name, message_ids=("missing",)) for name in ("archive", "purge")]
    for spec in (*others, CANCEL, RESCHEDULE):
        assert (await one.start_redrive(spec)).spec == spec


async def _until_idle(mailbox: Mailbox, job: str) -> None:
    async def is_idle() -> bool:
        return not (await mailbox.get_redrive(job)).is_active

    await until_answer(is_idle)
