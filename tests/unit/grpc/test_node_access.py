"""The credentials of admins, runners and proxies."""

from typing import Any

import pytest

from postroom.adapters.grpc.node_access import NodeAccess, NodeNames
from postroom.adapters.sockets.address import resolve
from postroom.domain.errors import InvalidRequest, Unauthenticated, Unavailable

TOKEN = "n0de-" + "t" * 40


class Call:
    """What a server knows of a call."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


def check(access: NodeAccess, *metadata: tuple[str, str | bytes]) -> None:
    call: Any = Call(*metadata)
    access.check_caller(call, ("admin",))


def test_a_call_with_the_token_is_accepted() -> None:
    check(NodeAccess(TOKEN), *NodeAccess(TOKEN).metadata)


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", f"Bearer {TOKEN}x"),),
        (("authorization", f"Bearer {TOKEN[:-1]}"),),
        (("authorization", "Bearer "),),
        (("authorization", f"Basic {TOKEN}"),),
        (("authorization", TOKEN),),
        (("authorization", f"Bearer {TOKEN}"), ("authorization", f"Bearer {TOKEN}")),
        (("authorization-bin", f"Bearer {TOKEN}".encode()),),
        (("authorization", "Bearer é" + "t" * 40),),
    ],
)
def test_a_call_without_the_token_is_refused_and_the_token_is_not_shown(metadata: Any) -> None:
    with pytest.raises(Unauthenticated) as refused:
        check(NodeAccess(TOKEN), *metadata)
    assert TOKEN not in str(refused.value)


def test_without_a_token_every_call_is_accepted_and_none_is_sent() -> None:
    access = NodeAccess()
    check(access, ("authorization", "Bearer anything"))
    assert access.metadata == ()


@pytest.mark.parametrize("token", ["", "short", "x" * 31, "x" * 513, "x" * 32 + " ", "é" * 32, b"x" * 32, 7])
def test_a_token_that_is_malformed_is_refused_and_not_shown(token: Any) -> None:
    with pytest.raises(InvalidRequest, match="32 to 512") as refused:
        NodeAccess(token)
    assert not str(token) or str(token) not in str(refused.value).replace("32 to 512", "").replace("32.", "")


def test_its_text_has_no_token() -> None:
    assert TOKEN not in repr(NodeAccess(TOKEN))


def test_beyond_loopback_callers_need_a_token_or_a_certificate() -> None:
    anywhere = resolve("0.0.0.0:0", is_protected=True)
    with pytest.raises(InvalidRequest, match="node_token"):
        NodeAccess().check_address(anywhere, None)
    NodeAccess(TOKEN).check_address(anywhere, None)
    NodeAccess().check_address(resolve("127.0.0.1:0"), None)


def test_a_name_of_a_certificate_gives_the_roles_that_the_settings_say() -> None:
    names = NodeNames(
        admin=("Admin-1.example",), proxy=("*.proxies.example", "10.0.0.7"), runner=("10.0.0.7",)
    )
    for name, roles in {
        "admin-1.EXAMPLE": {"admin"},
        "one.proxies.example": {"proxy"},
        "10.0.0.7": {"proxy", "runner"},
        "a.b.proxies.example": set(),
        "proxies.example": set(),
        "xadmin-1.example": set(),
        "client.example": set(),
        "": set(),
    }.items():
        assert names.find_roles([name]) == roles
    assert names.find_roles(["client.example", "admin-1.example"]) == {"admin"}


def test_an_owner_at_a_host_that_is_no_node_is_not_called() -> None:
    access = NodeAccess(names=NodeNames(admin=("admin.example",), runner=("runner.example",)))
    for address in ("client.example:1", "admin.example:1", "unix:/run/socket"):
        with pytest.raises(Unavailable, match="nothing was sent to it"):
            access.open_owner_channel(address)
