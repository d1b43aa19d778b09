"""Protection of network surfaces against calls from other machines."""

from typing import NamedTuple

from postroom.adapters.sockets.address import Address, resolve
from postroom.adapters.sockets.connections import ConnectionLimits
from postroom.adapters.sockets.tls import ServerTls
from postroom.domain.errors import InvalidRequest

ANY_HOST = "*"


class Protection(NamedTuple):
    """How a surface is protected; without any of it, only this machine is served.

    Arguments:
        tls: certificate of the server; Unix sockets need none.
        behind_proxy: a proxy in front speaks TLS, and nobody else reaches the address.
        allowed_hosts: names besides those of loopback that the `Host` of a request may have; `*` is any.
        limits: of the connections of a process of a cluster.
    """

    tls: ServerTls | None = None
    behind_proxy: bool = False
    allowed_hosts: tuple[str, ...] = ()
    limits: ConnectionLimits = ConnectionLimits()

    def resolve(self, text: str) -> Address:
        """Return an address to listen at; see `resolve`."""
        return resolve(text, is_protected=self.tls is not None or self.behind_proxy)

    def tls_at(self, address: Address) -> ServerTls | None:
        """Return the certificate with which an address is served."""
        return None if address.is_unix else self.tls


def check_access(address: Address, *, is_dev: bool) -> None:
    """Raise InvalidRequest when other machines could call a service that asks for no tokens."""
    if is_dev and not address.is_local:
        raise InvalidRequest(
            f"{address.text} is reached from other machines, and --dev asks for no tokens; use "
            "127.0.0.1:PORT or unix:PATH, or serve without --dev."
        )
