"""How admins, runners and proxies authenticate each other, and the handlers of the calls between them."""

import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple

import grpc
import msgspec
from google.protobuf.message import Message

from postroom.adapters.grpc.calls import DETAILS_KEY, Method, read_metadata, status_code, status_of
from postroom.adapters.grpc.connections import GrpcConnections, open_channel
from postroom.adapters.grpc.messages import read_request
from postroom.adapters.sockets.address import Address, split_address
from postroom.adapters.sockets.tls import ClientFiles, ServerTls
from postroom.application.caller import read_bearer
from postroom.application.telemetry import logger
from postroom.application.tracing import context_of, correlate_task, tracer
from postroom.domain.errors import (
    Forbidden,
    InternalError,
    InvalidRequest,
    PostroomError,
    Unauthenticated,
    Unavailable,
)

MIN_TOKEN_CHARS, MAX_TOKEN_CHARS = 32, 512
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/-]{{{MIN_TOKEN_CHARS},{MAX_TOKEN_CHARS}}}=*")
_AUTHORIZATION = "authorization"
_SUBJECT_NAMES: Final = "x509_subject_alternative_name"

ROLES: Final = ("admin", "proxy", "runner")


class NodeNames(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Names in the certificates of the cluster's processes (subject alternative names), by their roles.

    A name is a host, IP address or URI as it is in the certificate; `*.example.com` covers one label.
    """

    admin: tuple[str, ...] = ()
    proxy: tuple[str, ...] = ()
    runner: tuple[str, ...] = ()

    def find_roles(self, names: Iterable[str]) -> set[str]:
        """Return the roles of a certificate with these names."""
        forms = {form for name in names for form in (name.lower(), f"*.{name.lower().partition('.')[2]}")}
        return {role for role in ROLES if forms & {each.lower() for each in getattr(self, role)}}


class NodeAccess:
    """Credentials of a process of the cluster, for the calls that it makes and serves.

    Arguments:
        token: secret that all processes of the cluster share; None neither sends a token nor asks for one.
        tls: certificates with which to call other processes; None calls them without TLS.
        names: names in the certificates of processes that may call; None asks for no certificates.

    Raises, when it is made: InvalidRequest for a token that is not 32 to 512 letters, digits or any of
        `._~+/-`; the error does not show it.
    """

    def __init__(
        self, token: str | None = None, tls: ClientFiles | None = None, names: NodeNames | None = None
    ) -> None:
        if token is not None and (type(token) is not str or not _TOKEN.fullmatch(token)):
            raise InvalidRequest(
                f"node_token of [cluster] must be {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} letters, digits or "
                "any of ._~+/-; make one with: openssl rand -hex 32."
            )
        self._token = None if token is None else token.encode()
        self.tls = tls
        self._names = names

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

    def open_owner_channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to the owner of a mailbox, with a connection of its own.

        Raises: Unavailable when the host is not a runner or proxy that the settings name: TLS proves only
            that the server has the name in its address, and a client's certificate may have that name.
        """
        if not self.is_node(address, ("runner", "proxy")):
            raise Unavailable(
                f"{address} is not the address of a runner or proxy in nodes of [cluster]; nothing was "
                "sent to it."
            )
        return self.open_channel(address, is_shared=False)

    def is_node(self, address: str, roles: Collection[str]) -> bool:
        """Return whether an address has the host of a node of these roles; True if nodes have no names."""
        host = address if address.startswith("unix:") else split_address(address)[0]
        return self._names is None or not self._names.find_roles([host]).isdisjoint(roles)

    def check_caller(
        self, context: "grpc.aio.ServicerContext[object, object]", roles: Collection[str]
    ) -> None:
        """Check the token and the certificate of a call that is served.

        The check of the token is constant in time for tokens of one length.

        Arguments:
            roles: roles that may make the call.

        Raises: Unauthenticated for a missing or wrong token, and for a certificate without a name of a node;
            Forbidden for a node with another role.
        """
        if self._names is not None:
            names = context.auth_context().get(_SUBJECT_NAMES, ())
            own = self._names.find_roles(each.decode("utf-8", "replace") for each in names)
            if not own:
                raise Unauthenticated(
                    "The caller's certificate has no name of a node; add its name to nodes of [cluster]."
                )
            if not own & {*roles}:
                raise Forbidden(
                    f"The caller's certificate is of a node with the role {', '.join(sorted(own))}, and the "
                    f"call needs the role {' or '.join(sorted(roles))}; see nodes of [cluster]."
                )
        if self._token is None:
            return
        metadata = context.invocation_metadata() or ()
        sent = read_bearer([str(value) for key, value in metadata if key == _AUTHORIZATION])
        if sent is None or not hmac.compare_digest(sent.encode(), self._token):
            raise Unauthenticated(
                "The call has no valid node token; set node_token of [cluster] to the called process's token."
            )

    def check_address(self, address: Address, tls: ServerTls | None) -> None:
        """Check that calls of other machines are authenticated.

        Arguments:
            address: address at which this process is to listen.
            tls: certificate with which the address is served.

        Raises: InvalidRequest for an address beyond loopback with neither a token nor names, for names if
            clients need no certificates, and for client certificates if nothing tells nodes from clients.
        """
        has_mutual_tls = tls is not None and tls.asks_clients
        if self._names is not None and not has_mutual_tls:
            raise InvalidRequest(
                "nodes of [cluster] are names in the certificates of callers; set tls_certificate, tls_key "
                f"and tls_client_ca for {address.text}, too."
            )
        if self._token is not None or self._names is not None:
            return
        if has_mutual_tls:
            raise InvalidRequest(
                f"tls_client_ca of {address.text} does not tell nodes of the cluster from clients with a "
                "certificate of the same authority; set node_token of [cluster], or nodes."
            )
        if not address.is_local:
            raise InvalidRequest(
                f"{address.text} is reached from other machines, and callers are not authenticated; set "
                "node_token of [cluster], or tls_client_ca and nodes, or use 127.0.0.1:PORT."
            )


CORR_ID_KEY = "x-corr-id"

Context = grpc.aio.ServicerContext[Any, Any]


class NodeCall(NamedTuple):
    """A call.

    Arguments:
        metadata: metadata of the caller by key.
        trailers: metadata of the answer, to which a handler may add.
    """

    metadata: Mapping[str, str]
    trailers: dict[str, str]


NodeHandler = Callable[[Any, NodeCall], Awaitable[Message]]


class NodeHandlers(grpc.GenericRpcHandler):
    """Handlers of unary calls of one service, which check the node token and turn errors into statuses.

    Arguments:
        handlers: handlers by method name; methods without a handler answer UNIMPLEMENTED.
        methods: methods of the service.
        access: credentials by which callers are checked.
        roles: roles that may call each method; anybody may call a method that is not listed.
    """

    def __init__(
        self,
        handlers: Mapping[str, NodeHandler],
        methods: Mapping[str, Method],
        access: NodeAccess,
        roles: Mapping[str, Collection[str]],
    ) -> None:
        self._access = access
        self._connections = GrpcConnections()
        self.names = tuple({methods[name].path.split("/")[1] for name in handlers})
        self._handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            methods[name].path: grpc.unary_unary_rpc_method_handler(
                self._run(methods[name], handler, roles.get(name)),
                request_deserializer=None,  # `read_request` parses requests: its error has a code
                response_serializer=methods[name].response.SerializeToString,
            )
            for name, handler in handlers.items()
        }

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """Return the handler of a path."""
        return self._handlers.get(handler_call_details.method)

    def watch(self, connections: GrpcConnections) -> None:
        """Note connections with a valid token; see `Handlers.watch`."""
        self._connections = connections

    def end_waits(self) -> None:
        """Do nothing: no call waits for an event."""

    async def close(self) -> None:
        """Do nothing: nothing remains of a call."""

    def _run(self, method: Method, handler: NodeHandler, roles: Collection[str] | None) -> Any:
        async def run(data: bytes, context: Context) -> Any:
            metadata = read_metadata(context.invocation_metadata())
            corr_id = correlate_task(metadata.get(CORR_ID_KEY))
            with tracer().serve(method.path[1:], "grpc", context_of(metadata)) as span:
                call = NodeCall(metadata, {CORR_ID_KEY: corr_id})
                try:
                    if roles is not None:
                        self._access.check_caller(context, roles)
                        self._connections.note(context.peer())
                    answer = await handler(read_request(method.request, data), call)
                    context.set_trailing_metadata(tuple(call.trailers.items()))
                    return answer
                except PostroomError as error:
                    failure = error
                except Exception:
                    logger().exception("grpc.call_failed")
                    failure = InternalError(
                        "The call failed because of a defect in Postroom; the server's log has it."
                    )
                span.fail(failure.code)
                status = status_of(failure)
                details = ((DETAILS_KEY, status.SerializeToString()), *call.trailers.items())
                return await context.abort(status_code(failure), status.message, details)

        return run
