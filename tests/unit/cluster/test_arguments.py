"""Arguments of every type in every place of the control plane."""

from typing import Any

import msgspec
import pytest

from postroom.adapters.memory.lease_store import MemoryLeaseStore
from postroom.application.cluster.control_plane import ControlPlane
from postroom.application.cluster.control_plane_metrics import ControlPlaneSettings
from postroom.application.ports.control_plane import Heartbeat
from postroom.domain.errors import InvalidRequest
from tests.support.clocks import ManualClock
from tests.support.lease_requests import lease_request
from tests.support.route_push import RecordedPush, call_at_once

VALUES: list[Any] = [0, -1, True, 1.5, b"x", "", "\ud800", "a\0b", [], {}, object(), 1 << 64, float("nan")]
MAILBOX = "orders@proxy-1"
NUMBERS = ("log_epoch", "epoch", "events_stored", "queries_served", "storage_size_bytes")
"""Of which 0 is one."""


@pytest.fixture
def plane() -> ControlPlane:
    return ControlPlane(MemoryLeaseStore(), ManualClock(), RecordedPush(), call_at_once)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
async def test_a_malformed_argument_is_refused_and_changes_nothing(plane: ControlPlane, value: Any) -> None:
    request = msgspec.structs.asdict(lease_request())
    heartbeat = {"mailbox": MAILBOX, "runner": "runner-1", "proxy": "proxy-1"}
    changes = (*heartbeat, "epoch", "events_stored", "queries_served", "storage_size_bytes", "status")
    calls: list[Any] = [
        plane.acquire_lease(type(lease_request())(**request | {name: value}))
        for name in request
        if not (name in NUMBERS and value == 0)
    ]
    calls += [
        plane.renew_lease(Heartbeat(**heartbeat | {name: value}))
        for name in changes
        if not (name in NUMBERS and value == 0)
    ]
    calls += [
        plane.release_lease(value, "runner-1"),
        plane.release_lease(MAILBOX, value),
        plane.register_proxy(value, "h:1"),
        plane.register_proxy("p", value),
        plane.register_runner(value, "p", "h:1"),
        plane.register_runner("r", value, "h:1"),
        plane.register_runner("r", "p", value),
        plane.register_runner("r", "p", "h:1", [value]),
        plane.leave(proxy=value),
        plane.leave(runner=value),
        plane.list_leases(value),
    ]
    for call in calls:
        with pytest.raises(InvalidRequest):
            await call
    assert await plane.list_leases() == []
    assert await plane.list_members() == []


@pytest.mark.parametrize(
    "settings", [{"member_ttl_ms": 999}, {"poll_ms": 0}, {"poll_ms": 15_001}, {"call_ms": "1"}]
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        ControlPlaneSettings(**settings).validate()
