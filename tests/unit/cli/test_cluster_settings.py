import pytest

from postroom.adapters.cli.admin import ClusterSettings, ListenSettings
from postroom.adapters.cli.settings import InvalidSettings, load_settings
from postroom.adapters.compose.control_plane import advertised_address, check_admins
from postroom.adapters.sockets.address import resolve
from postroom.domain.errors import InvalidRequest

TOKEN = "0123456789abcdef" * 2


def test_processes_of_a_cluster_call_each_other_with_tls_where_a_certificate_is_named() -> None:
    assert ClusterSettings(node_token=TOKEN).access().scheme == "grpc"
    assert ClusterSettings(ca="ca.pem").access().scheme == "grpcs"
    assert ClusterSettings(tls=True).access().scheme == "grpcs"


def test_a_node_token_that_is_too_short_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidRequest, match="32 to 512") as refused:
        ClusterSettings(node_token="canary").access()
    assert "canary" not in str(refused.value)


def test_a_certificate_needs_its_key() -> None:
    with pytest.raises(InvalidSettings, match=r"\[proxy\]: TLS needs both"):
        ListenSettings(tls_certificate="server.pem").protection("proxy")
    with pytest.raises(InvalidRequest, match="both certificate and key"):
        ClusterSettings(certificate="client.pem").access()


def test_the_node_token_may_come_from_the_environment() -> None:
    settings = load_settings({}, {"POSTROOM_CLUSTER__NODE_TOKEN": TOKEN, "POSTROOM_CLUSTER__TLS": "true"})
    assert settings.section("cluster", ClusterSettings).node_token == TOKEN
    assert settings.section("cluster", ClusterSettings).tls


def test_admins_are_named_by_addresses_with_commas_between_them() -> None:
    assert check_admins("one:7000, [::1]:7000,10.0.0.5:1") == ["one:7000", "[::1]:7000", "10.0.0.5:1"]


@pytest.mark.parametrize(
    "text", ["", ",", "one", "one:7000,", "one:0", "one:70000", "http://one:7000", "a b:1"]
)
def test_a_malformed_address_of_an_admin_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="host:port"):
        check_admins(text)


def test_a_process_is_reached_where_it_listens_unless_the_settings_say_otherwise() -> None:
    target = resolve("127.0.0.1:0")
    assert advertised_address("grpc://127.0.0.1:7000", target, None) == "127.0.0.1:7000"
    assert advertised_address("grpc://127.0.0.1:7000", target, "one.local:7000") == "one.local:7000"
    assert (
        advertised_address("grpc+unix:/run/p.sock", resolve("unix:/run/p.sock"), None) == "unix:/run/p.sock"
    )


@pytest.mark.parametrize("listen", ["0.0.0.0:7000", "[::]:7000"])
def test_a_process_that_listens_at_all_addresses_must_say_where_it_is_reached(listen: str) -> None:
    target = resolve(listen, is_protected=True)
    with pytest.raises(InvalidRequest, match="set address to the host:port"):
        advertised_address(f"grpc://{listen}", target, None)
    assert advertised_address(f"grpc://{listen}", target, "one:7000") == "one:7000"


def test_names_of_nodes_are_lists_by_role() -> None:
    ClusterSettings(nodes={"admin": ("admin-1.example",), "runner": ("*.example",)}).access()
    with pytest.raises(InvalidRequest, match=r"\[cluster\] nodes: .*`admins`"):
        ClusterSettings(nodes={"admins": ("admin-1.example",)}).access()
