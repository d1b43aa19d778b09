"""Connections without a valid token: their shares, and which of them are closed."""

import pytest

from postroom.adapters.sockets.connections import GRACE_SECONDS, UnauthenticatedConnections, address_of


class World:
    """Connections, a clock, and what was closed."""

    def __init__(self, maximum: int, per_address: int) -> None:
        self.now = 0.0
        self.closed: list[str] = []
        self.connections = UnauthenticatedConnections[str](
            self.closed.append, maximum, per_address, lambda: self.now
        )

    def add(self, *names: str) -> None:
        """Add connections, whose first letter is that of their address."""
        for name in names:
            self.connections.add(name, (f"192.0.2.{ord(name[0])}", 1))


def test_connections_above_the_share_of_their_address_are_closed_once_they_had_their_time() -> None:
    world = World(100, 2)
    world.add("a1", "a2", "b1", "a3", "a4")
    assert world.closed == []
    world.now = GRACE_SECONDS
    world.add("b2")
    assert world.closed == ["a1", "a2"]


def test_above_the_share_of_all_the_address_with_the_most_connections_loses_its_oldest() -> None:
    world = World(3, 100)
    world.add("b1", "a1", "a2", "a3")
    world.now = GRACE_SECONDS
    world.add("c1")
    assert world.closed == ["a1", "a2"]
    assert [*world.connections] == ["b1", "a3", "c1"]


def test_a_connection_that_has_shown_a_token_is_not_closed() -> None:
    world = World(1, 1)
    world.add("a1")
    world.connections.discard("a1")
    world.now = GRACE_SECONDS
    world.add("a2", "a3")
    assert (world.closed, "a1" in world.connections) == ([], False)


def test_room_is_made_by_the_address_with_the_most_connections_whatever_their_age() -> None:
    world = World(100, 100)
    assert not world.connections.make_room()
    world.add("b1", "a1", "a2")
    assert world.connections.make_room()
    assert world.closed == ["a1"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("127.0.0.1", 1), ("127.9.9.9", 2)),
        (("127.0.0.1", 1), ("::1", 2, 0, 0)),
        (("127.0.0.1", 1), "/run/socket"),
        (("192.0.2.7", 1), ("::ffff:192.0.2.7", 2, 0, 0)),
        (("2001:db8::1", 1, 0, 0), ("2001:db8::ffff:0:0:2", 2, 0, 0)),
        (("fe80::1%eth0", 1, 0, 2), ("fe80::2%eth0", 1, 0, 2)),
    ],
)
def test_addresses_that_one_client_has_count_as_one(one: object, other: object) -> None:
    assert address_of(one) == address_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("192.0.2.7", 1), ("192.0.2.8", 1)),
        (("2001:db8::1", 1, 0, 0), ("2001:db8:0:1::1", 1, 0, 0)),
        (("192.0.2.7", 1), ("127.0.0.1", 1)),
    ],
)
def test_addresses_of_different_clients_are_different(one: object, other: object) -> None:
    assert address_of(one) != address_of(other)
