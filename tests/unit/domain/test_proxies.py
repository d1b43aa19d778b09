"""Registrations of proxies, and the assignment of partitions to them."""

from typing import Any

import pytest
from msgspec.structs import asdict, replace

from postroom.domain.errors import InvalidRequest
from postroom.domain.lease.partitions import NO_PARTITIONS, assign_partitions
from postroom.domain.lease.routing import (
    AssignPartitions,
    ExpireProxy,
    LeaveProxy,
    PartitionAssignment,
    PartitionsAssigned,
    Proxy,
    ProxyChange,
    ProxyCommand,
    ProxyExpired,
    ProxyLeft,
    ProxyRegistered,
    ProxyRenewed,
    RegisterProxy,
    decide,
    decide_assignment,
    evolve,
    evolve_assignment,
)
from postroom.domain.names import partitions_stream, proxy_stream

REGISTER = RegisterProxy("proxy-1", "10.0.0.1:7070", 30_000)
REGISTERED = ProxyRegistered(proxy_stream("proxy-1"), 1, 10, "proxy-1", "10.0.0.1:7070", 30_000, 10)


def after(event: ProxyChange, cls: type[Any], *, at: int, **changes: Any) -> Any:
    return cls(**asdict(event) | {"version": event.version + 1, "at": at} | changes)


RENEWED: ProxyRenewed = after(REGISTERED, ProxyRenewed, at=20)
LEFT: ProxyLeft = after(REGISTERED, ProxyLeft, at=20)
EXPIRED: ProxyExpired = after(REGISTERED, ProxyExpired, at=20)
MOVED: ProxyRegistered = after(REGISTERED, ProxyRegistered, at=20, address="10.0.0.2:7070", joined_at=20)
AGAIN: ProxyRegistered = after(LEFT, ProxyRegistered, at=20, joined_at=20)


@pytest.mark.parametrize(
    ("history", "command", "events"),
    [
        ([], REGISTER, [replace(REGISTERED, at=20, joined_at=20)]),
        ([REGISTERED], REGISTER, [RENEWED]),
        ([REGISTERED], replace(REGISTER, address="10.0.0.2:7070"), [MOVED]),
        ([REGISTERED, LEFT], REGISTER, [AGAIN]),
        ([], LeaveProxy("proxy-1"), []),
        ([REGISTERED], LeaveProxy("proxy-1"), [LEFT]),
        ([REGISTERED, LEFT], LeaveProxy("proxy-1"), []),
        ([], ExpireProxy("proxy-1", 1), []),
        ([REGISTERED], ExpireProxy("proxy-1", 1), [EXPIRED]),
        ([REGISTERED, RENEWED], ExpireProxy("proxy-1", 1), []),
        ([REGISTERED, LEFT], ExpireProxy("proxy-1", 2), []),
    ],
)
def test_a_proxy_joins_renews_leaves_and_expires(
    history: list[ProxyChange], command: ProxyCommand, events: list[ProxyChange]
) -> None:
    proxy: Proxy | None = None
    for event in history:
        proxy = evolve(proxy, event)
        assert evolve(None, event) == proxy
    assert decide(command, proxy, 20) == events


@pytest.mark.parametrize(
    "command",
    [
        replace(REGISTER, proxy="a@b"),
        replace(REGISTER, address="nowhere"),
        replace(REGISTER, ttl_ms=0),
        replace(REGISTER, ttl_ms=1.5),
        LeaveProxy(""),
        ExpireProxy("proxy-1", True),
    ],
    ids=repr,
)
def test_a_malformed_registration_is_refused(command: ProxyCommand) -> None:
    with pytest.raises(InvalidRequest):
        decide(command, None, 20)


def test_partitions_are_assigned_by_the_admin_that_knows_most() -> None:
    command = AssignPartitions(("a", "b"), 7)
    (event,) = decide_assignment(command, None, 20)
    partitions = assign_partitions(NO_PARTITIONS, ["a", "b"])
    assert event == PartitionsAssigned(partitions_stream(), 1, 20, partitions.owners, 7)
    assignment = evolve_assignment(None, event)
    assert assignment == PartitionAssignment(partitions, 7, 1)
    assert decide_assignment(AssignPartitions(("b", "a"), 9), assignment, 30) == []
    assert decide_assignment(AssignPartitions(("a",), 7), assignment, 30) == []
    (event,) = decide_assignment(AssignPartitions(("b",), 8), assignment, 30)
    assert (event.version, {*event.owners}, event.position) == (2, {"b"}, 8)
