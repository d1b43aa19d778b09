"""How admins, runners and proxies know each other: by a token that they share, by mutual TLS, or by both."""

import hmac
import re

import grpc

from postroom.adapters.grpc.channels import open_channel
from postroom.adapters.sockets.address import Address
from postroom.adapters.sockets.client_tls import ClientFiles
from postroom.adapters.sockets.tls import ServerTls
from postroom.application.bearer import read_bearer
from postroom.domain.errors import InvalidRequest, Unauthenticated

MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 32, 512
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN_CHARS},{MAX_TOKEN_CHARS}}}=*")
_AUTHORIZATION = "authorization"


class NodeAccess:
    """Credentials of a process of the cluster, for the calls that it makes and those that it serves.

    Arguments:
        token: secret that all processes of the cluster share; None neither sends nor asks for one.
        tls: certificates for calls of other processes; None calls them without TLS.

    Raises, when it is made: InvalidRequest for a token that is no text of 32 to 512 letters, digits or any of
        `._~+/-`; the error does not show it.
    """

    def __init__(self, token: str | None = None, tls: ClientFiles | None = None) -> None:
        if token is not None and (type(token) is not str or not _TOKEN.fullmatch(token)):
            raise InvalidRequest(
                f"node_token of [cluster] must be {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} letters, digits or "
                "any of ._~+/-; make one with: openssl rand -hex 32."
            )
        self._token = None if token is None else token.encode()
        self.tls = tls

    def __repr__(self) -> str:
        return "NodeAccess()"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata with which a call shows the token."""
        return () if self._token is None else ((_AUTHORIZATION, f"Bearer {self._token.decode()}"),)

    @property
    def scheme(self) -> str:
        """Return `grpcs` if other processes are called with TLS, else `grpc`."""
        return "grpc" if self.tls is None else "grpcs"

    def open_channel(self, address: str, *, is_shared: bool = True) -> grpc.aio.Channel:
        """Return a channel to another process of the cluster; see `open_channel`.

        Calls need `metadata`, too.
        """
        return open_channel(address, self.tls, is_shared=is_shared)

    def check_caller(self, context: "grpc.aio.ServicerContext[object, object]") -> None:
        """Check the token of a call that is served; constant in time for tokens of one length.

        Raises: Unauthenticated without the token, and for another one.
        """
        if self._token is None:
            return
        metadata = context.invocation_metadata() or ()
        sent = read_bearer([str(value) for key, value in metadata if key == _AUTHORIZATION])
        if sent is None or not hmac.compare_digest(sent.encode(), self._token):
            raise Unauthenticated(
                "The call has no valid node token; set node_token of [cluster] to that of the process called."
            )

    def check_address(self, address: Address, tls: ServerTls | None) -> None:
        """Check that calls of other machines are authenticated.

        Arguments:
            address: at which this process is to listen.
            tls: the certificate with which it is served.

        Raises: InvalidRequest for an address beyond loopback with neither a token nor mutual TLS.
        """
        has_mutual_tls = tls is not None and tls.asks_clients
        if not (address.is_local or self._token is not None or has_mutual_tls):
            raise InvalidRequest(
                f"{address.text} is reached from other machines, and callers are not authenticated; set "
                "node_token of [cluster], or tls_client_ca, or use 127.0.0.1:PORT."
            )
