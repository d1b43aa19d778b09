"""URLs of servers."""

import pytest

from postroom.adapters.compose.connect import connect_remote
from postroom.adapters.compose.store import is_remote
from postroom.domain.errors import InvalidRequest, Unavailable


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://:80",
        "http://host:port",
        "http://host:70000",
        "http://host/path",
        "http://host?x=1",
        "http://user:secret@host",
        "http+unix://host/path",
        "http+unix:relative",
        "grpc://host",
        "grpc+unix:",
        "ftp://host:80",
        "orders.db",
        "http://[::1",
        "",
    ],
)
async def test_a_malformed_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        async with connect_remote(url, timeout_ms=100):
            pass
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:1",
        "http://[::1]:1/",
        "grpc://127.0.0.1:1",
        "grpc://[::1]:1",
        "http+unix:/none",
        "grpc+unix:/none",
    ],
)
async def test_a_server_that_is_not_there_is_unavailable(url: str) -> None:
    assert is_remote(url)
    with pytest.raises(Unavailable, match=r"can't be reached|did not answer"):
        async with connect_remote(url, timeout_ms=300):
            pass


@pytest.mark.parametrize(
    "store", ["memory:", "orders.db", "postgresql://shop@host/db", "C:\\orders.db", 5, None]
)
def test_a_store_is_not_a_server(store: object) -> None:
    assert not is_remote(store)


@pytest.mark.parametrize("value", [0, -1, True, "1", None, 1 << 60])
async def test_a_timeout_is_a_number_of_milliseconds(value: object) -> None:
    with pytest.raises(InvalidRequest, match="timeout_ms"):
        async with connect_remote("http://127.0.0.1:1", timeout_ms=value):  # type: ignore[arg-type]
            pass
