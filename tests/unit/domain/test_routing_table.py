"""The routing table of a proxy or an admin (RFC-049 Routing Coordination)."""

from postroom.domain.lease.routing import Route, RoutingTable


def route(mailbox: str = "orders@p", runner: str = "r1", *, position: int, epoch: int = 1) -> Route:
    return Route(mailbox, "p", runner, f"{runner}:7070", 7, position, epoch)


def test_a_newer_route_replaces_an_older_one_and_never_the_other_way() -> None:
    table = RoutingTable()
    assert table.update(route(runner="r2", position=9, epoch=2))
    assert not table.update(route(position=5))
    assert not table.update(route(runner="r3", position=9, epoch=2))
    assert table.get("orders@p") == route(runner="r2", position=9, epoch=2)


def test_a_later_position_of_the_same_lease_changes_nothing() -> None:
    table = RoutingTable()
    table.update(route(position=5))
    assert not table.update(route(position=6))
    assert table.get("orders@p") == route(position=5)


def test_an_update_from_before_a_removal_does_not_bring_a_route_back() -> None:
    table = RoutingTable()
    assert not table.remove("orders@p", 8)
    assert not table.update(route(position=5))
    assert table.update(route(position=9))
    assert not table.remove("orders@p", 8)
    assert table.remove("orders@p", 10)
    assert not table.remove("orders@p", 10)
    assert table.get("orders@p") is None


def test_a_whole_table_keeps_what_is_newer_than_it() -> None:
    table = RoutingTable()
    table.update(route("gone@p", position=3))
    table.update(route("new@p", position=12))
    table.remove("removed@p", 11)
    assert table.position == 0
    whole = [route("old@p", position=4), route("removed@p", position=6), route("new@p", "r0", position=7)]
    assert table.replace_all(10, whole)
    assert table.routes() == [route("new@p", position=12), route("old@p", position=4)]
    assert table.position == 10
    assert not table.update(route("gone@p", position=3))
    assert not table.update(route("removed@p", position=6))
    assert not table.update(route("removed@p", position=11))


def test_an_older_table_does_not_replace_a_newer_one() -> None:
    table = RoutingTable()
    table.replace_all(10, [route(position=4)])
    assert not table.replace_all(9, [])
    assert table.routes() == [route(position=4)]
    assert table.replace_all(11, [])
    assert table.routes() == []


def test_a_fold_in_order_completes_the_table_as_it_goes() -> None:
    table = RoutingTable()
    table.update(route(position=4))
    table.complete(4)
    table.remove("orders@p", 5)
    table.complete(5)
    table.complete(3)
    assert table.position == 5
    assert not table.update(route(position=4))
    assert table.update(route(position=6))


def test_routes_are_listed_by_namespace() -> None:
    table = RoutingTable()
    for mailbox in ("orders@b", "orders@a", "orders-2@a"):
        table.update(route(mailbox, position=1))
    assert [each.mailbox for each in table.routes("orders")] == ["orders@a", "orders@b"]
    assert len(table.routes()) == 3
