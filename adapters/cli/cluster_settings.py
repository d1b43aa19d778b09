"""Settings that admins, runners and proxies have in common: `[cluster]`, and the TLS of their servers."""

from typing import TYPE_CHECKING

import msgspec

from postroom.adapters.cli.settings import InvalidSettings
from postroom.adapters.compose.cluster import check_admins, open_node_access
from postroom.adapters.compose.remote import ClientTls
from postroom.adapters.sockets.connections import ConnectionLimits

if TYPE_CHECKING:
    from postroom.adapters.compose.cluster import NodeAccess
    from postroom.adapters.compose.serve import Protection


DEFAULT_ADMIN = "127.0.0.1:8981"


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of `[cluster]`: how admins, runners and proxies know each other.

    Arguments:
        admin: `host:port` of the admins, with commas between them.
        node_token: secret that all of them share, 32 characters or more; None for none.
        tls: call the others with TLS; so do `ca` and `certificate`.
        ca: file in PEM of the authorities that the others' certificates may be signed by; None takes the
            system's.
        certificate, key: files in PEM of the certificate with which this process calls the others.
        nodes: names in the certificates of admins, proxies and runners, by role; see `NodeNames`.
    """

    admin: str = DEFAULT_ADMIN
    node_token: str | None = None
    tls: bool = False
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    nodes: dict[str, tuple[str, ...]] | None = None

    def validate(self) -> "ClusterSettings":
        """Return the settings; raise InvalidRequest when `admin` is not a valid address."""
        check_admins(self.admin)
        return self

    def access(self) -> "NodeAccess":
        """Return the credentials of this process.

        Raises: InvalidRequest for a token or file that can't be used, MissingExtra without grpcio.
        """
        files = ClientTls(self.ca, self.certificate, self.key)
        return open_node_access(self.node_token, files if self.tls or any(files) else None, self.nodes)


class ListenSettings(ConnectionLimits, frozen=True, kw_only=True):
    """Settings of a server of the cluster; base of `[admin]`, `[runner]` and `[proxy]`.

    Arguments:
        listen: `host:port` or `unix:path` of the gRPC server.
        address: at which the other processes reach it; None takes `listen`.
        tls_certificate, tls_key: files in PEM; hosts and ports are served with TLS then.
        tls_client_ca: file in PEM of the authorities of clients' certificates, which are then required.
        behind_proxy: something in front speaks TLS, and nobody else reaches the address.
    """

    listen: str | None = None
    address: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    behind_proxy: bool = False

    def protection(self, section: str) -> "Protection":
        """Return how the server is protected; raise InvalidRequest for an unusable certificate.

        Arguments:
            section: name of the settings' section, for errors.
        """
        from postroom.adapters.compose.serve import Protection, ServerTls, TlsFiles

        tls = None
        if self.tls_certificate is not None and self.tls_key is not None:
            tls = ServerTls(TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca))
        elif self.tls_certificate or self.tls_key or self.tls_client_ca:
            raise InvalidSettings(
                f"[{section}]: TLS needs both tls_certificate and tls_key; set both, or neither."
            )
        for name in ConnectionLimits.__struct_fields__:
            if getattr(self, name) < 1:
                raise InvalidSettings(
                    f"[{section}]: {name} must be at least 1; it was {getattr(self, name)}."
                )
        return Protection(tls, self.behind_proxy, limits=self)
