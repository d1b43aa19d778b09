"""Leases of mailboxes (RFC-049 Admin Plane Lease Management)."""

import re
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from postroom.domain.errors import InvalidRequest, LeaseHeld, LeaseLost, Rejected
from postroom.domain.lease.lease import (
    AcquireLease,
    ExpireLease,
    Lease,
    LeaseAcquired,
    LeaseChange,
    LeaseCommand,
    LeaseExpired,
    LeasePolicy,
    LeaseReleased,
    LeaseRenewed,
    ReleaseLease,
    RenewLease,
    decide,
    evolve,
)
from postroom.domain.lease.partitions import partition_of
from postroom.domain.names import lease_stream

MAILBOX = "orders@proxy-1"
FIRST, SECOND = "018f0000-0000-7000-8000-000000000001", "018f0000-0000-7000-8000-000000000002"
ACQUIRE = AcquireLease(MAILBOX, "runner-1", "proxy-1", "10.0.0.1:7070", FIRST, 0, 300_000, 60_000)
OTHER = replace(ACQUIRE, runner="runner-2", address="10.0.0.2:7070", acquisition=SECOND)
RENEW = RenewLease(MAILBOX, "runner-1", 1)
RELEASE = ReleaseLease(MAILBOX, "runner-1", 1)
ACQUIRED = LeaseAcquired(
    lease_stream(MAILBOX),
    1,
    10,
    MAILBOX,
    "runner-1",
    "proxy-1",
    "10.0.0.1:7070",
    partition_of(MAILBOX),
    1,
    FIRST,
    300_000,
    60_000,
    10,
    10,
    10,
)


def after(event: LeaseChange, cls: type[Any], *, at: int, **changes: Any) -> Any:
    """Return the event of type `cls` that follows another one."""
    return cls(**asdict(event) | {"version": event.version + 1, "at": at} | changes)


RENEWED: LeaseRenewed = after(ACQUIRED, LeaseRenewed, at=20, renewed_at=20)
RELEASED: LeaseReleased = after(ACQUIRED, LeaseReleased, at=20)
EXPIRED: LeaseExpired = after(ACQUIRED, LeaseExpired, at=20)


class Given:
    def __init__(self, *events: LeaseChange) -> None:
        self._lease: Lease | None = None
        for event in events:
            self._lease = evolve(self._lease, event)

    def when(self, command: LeaseCommand, *, at: int = 20, is_expired: bool = False) -> "Given":
        self._events: list[LeaseChange] = []
        self._rejection: Rejected | None = None
        try:
            self._events = decide(command, self._lease, at, is_expired=is_expired)
        except Rejected as error:
            self._rejection = error
        return self

    def then(self, *events: LeaseChange) -> None:
        assert (self._events, self._rejection) == ([*events], None)

    def then_rejected(self, error: type[Rejected], match: str, **fields: object) -> None:
        assert type(self._rejection) is error, f"instead came {self._rejection!r} {self._events}"
        assert re.search(match, str(self._rejection)), str(self._rejection)
        assert {name: getattr(self._rejection, name) for name in fields} == fields


def test_a_mailbox_without_a_lease_is_leased_to_the_first_runner_that_asks() -> None:
    Given().when(ACQUIRE, at=10).then(ACQUIRED)


@pytest.mark.parametrize(("log_epoch", "epoch"), [(0, 2), (1, 2), (7, 8)])
@pytest.mark.parametrize("end", [RELEASED, EXPIRED])
def test_every_acquisition_gets_an_epoch_above_the_last_lease_and_the_log(
    end: LeaseChange, log_epoch: int, epoch: int
) -> None:
    command = replace(OTHER, log_epoch=log_epoch)
    acquired = after(
        end,
        LeaseAcquired,
        at=30,
        runner="runner-2",
        address="10.0.0.2:7070",
        epoch=epoch,
        acquisition=SECOND,
        acquired_at=30,
        renewed_at=30,
    )
    Given(ACQUIRED, end).when(command, at=30).then(acquired)


def test_a_second_runner_is_refused_with_the_name_of_the_owner() -> None:
    Given(ACQUIRED).when(OTHER).then_rejected(
        LeaseHeld, "is leased by runner-1", mailbox=MAILBOX, runner="runner-1"
    )


def test_the_same_runner_acquires_its_lease_again_with_a_new_epoch() -> None:
    again = after(ACQUIRED, LeaseAcquired, at=20, epoch=2, acquisition=SECOND, acquired_at=20, renewed_at=20)
    Given(ACQUIRED).when(replace(ACQUIRE, acquisition=SECOND)).then(again)


def test_repeating_an_acquisition_keeps_its_epoch_and_renews_the_lease() -> None:
    Given(ACQUIRED).when(ACQUIRE).then(RENEWED)


@pytest.mark.parametrize("end", [RELEASED, EXPIRED])
def test_an_acquisition_that_is_repeated_after_its_lease_ended_does_not_bring_it_back(
    end: LeaseChange,
) -> None:
    Given(ACQUIRED, end).when(ACQUIRE).then_rejected(LeaseLost, "has ended")


def test_a_lease_that_has_expired_is_acquired_by_another_runner_without_waiting_for_the_expiry_loop() -> None:
    acquired = after(
        EXPIRED,
        LeaseAcquired,
        at=20,
        runner="runner-2",
        address="10.0.0.2:7070",
        epoch=2,
        acquisition=SECOND,
        acquired_at=20,
        renewed_at=20,
    )
    Given(ACQUIRED).when(OTHER, is_expired=True).then(EXPIRED, acquired)


@pytest.mark.parametrize("epoch", [1, None])
def test_the_holder_renews_its_lease(epoch: int | None) -> None:
    Given(ACQUIRED).when(replace(RENEW, epoch=epoch)).then(RENEWED)


@pytest.mark.parametrize(
    ("history", "command", "reason"),
    [
        ([], RENEW, "there is no lease"),
        ([ACQUIRED], replace(RENEW, runner="runner-2"), "it is owned by runner-1"),
        ([ACQUIRED], replace(RENEW, epoch=2), "acquired it again as epoch 1, not 2"),
        ([ACQUIRED, RELEASED], RENEW, "released or has expired"),
        ([ACQUIRED, EXPIRED], RENEW, "released or has expired"),
        ([], RELEASE, "there is no lease"),
        ([ACQUIRED], replace(RELEASE, runner="runner-2"), "it is owned by runner-1"),
        ([ACQUIRED, RELEASED], replace(RELEASE, runner="runner-2"), "it was last owned by runner-1"),
        ([ACQUIRED], replace(RELEASE, epoch=2), "acquired it again as epoch 1, not 2"),
    ],
)
def test_nobody_but_the_holder_renews_or_releases_a_lease(
    history: list[LeaseChange], command: LeaseCommand, reason: str
) -> None:
    Given(*history).when(command).then_rejected(LeaseLost, reason, mailbox=MAILBOX)


def test_a_lease_is_not_renewed_beyond_its_grace_period() -> None:
    Given(ACQUIRED).when(RENEW, is_expired=True).then_rejected(LeaseLost, "expired beyond its grace period")


@pytest.mark.parametrize("epoch", [1, None])
def test_the_holder_releases_its_lease_once(epoch: int | None) -> None:
    command = replace(RELEASE, epoch=epoch)
    Given(ACQUIRED).when(command).then(RELEASED)
    Given(ACQUIRED, RELEASED).when(command).then()


def test_a_lease_expires_only_in_the_version_that_was_observed() -> None:
    Given(ACQUIRED).when(ExpireLease(MAILBOX, 1)).then(EXPIRED)
    Given(ACQUIRED, RENEWED).when(ExpireLease(MAILBOX, 1)).then()
    Given(ACQUIRED, RELEASED).when(ExpireLease(MAILBOX, 2)).then()
    Given().when(ExpireLease(MAILBOX, 1)).then()


def test_a_fold_may_start_at_any_event() -> None:
    second = after(RELEASED, LeaseAcquired, at=30, epoch=2, acquired_at=30, renewed_at=30)
    history = [ACQUIRED, after(RENEWED, LeaseReleased, at=25), second, after(second, LeaseExpired, at=40)]
    lease: Lease | None = None
    for event in history:
        lease = evolve(lease, event)
        assert evolve(None, event) == lease


@pytest.mark.parametrize(
    "changes",
    [
        {"mailbox": "orders"},
        {"mailbox": "a@b@c"},
        {"mailbox": b"orders@proxy-1"},
        {"mailbox": None},
        {"runner": ""},
        {"runner": "a b"},
        {"runner": "r" * 129},
        {"runner": "a@b"},
        {"runner": "\ud800"},
        {"runner": 1},
        {"proxy": "p/q"},
        {"address": ""},
        {"address": "10.0.0.1"},
        {"address": "10.0.0.1:0"},
        {"address": "10.0.0.1:65536"},
        {"address": "host:7070\n"},
        {"address": "http://host:7070"},
        {"address": "unix:relative"},
        {"address": "unix:/a\x00b"},
        {"address": "user@host:7070"},
        {"acquisition": ""},
        {"acquisition": FIRST.upper()},
        {"acquisition": 7},
        {"log_epoch": -1},
        {"log_epoch": 2**47},
        {"log_epoch": True},
        {"log_epoch": 1.0},
        {"ttl_ms": 0},
        {"ttl_ms": 2**63},
        {"grace_ms": -1},
    ],
    ids=repr,
)
def test_a_malformed_acquisition_is_refused(changes: dict[str, Any]) -> None:
    Given().when(replace(ACQUIRE, **changes)).then_rejected(InvalidRequest, "must|UTF-8")


@pytest.mark.parametrize(
    "address", ["host:1", "10.0.0.1:65535", "[fd00::5]:7070", "unix:/run/r.sock", "a-b.c_d:7"]
)
def test_addresses_are_host_and_port_or_a_socket(address: str) -> None:
    (event,) = decide(replace(ACQUIRE, address=address), None, 10)
    assert isinstance(event, LeaseAcquired)
    assert event.address == address


# -- policies ---


def test_the_default_policy_is_that_of_the_specification() -> None:
    policy = LeasePolicy().validate()
    assert (policy.ttl_ms, policy.heartbeat_interval_ms, policy.grace_period_ms) == (300_000, 60_000, 60_000)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ttl_ms": 0}, "ttl_ms must be at least 1000"),
        ({"ttl_ms": 1_500}, "ttl_ms must be a multiple of 1000"),
        ({"ttl_ms": 10**9}, "ttl_ms must be at most"),
        ({"ttl_ms": 300_000.0}, "ttl_ms must be of type int"),
        ({"heartbeat_interval_ms": 0}, "heartbeat_interval_ms must be at least 1"),
        ({"heartbeat_interval_ms": 150_001}, "at most half of ttl_ms, 150000"),
        ({"grace_period_ms": 14_999}, "at least a twentieth of ttl_ms, 15000"),
        ({"grace_period_ms": True}, "grace_period_ms must be of type int"),
    ],
    ids=repr,
)
def test_durations_that_do_not_fit_each_other_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidRequest, match=match):
        LeasePolicy(**changes).validate()
    LeasePolicy(heartbeat_interval_ms=150_000, grace_period_ms=15_000).validate()
