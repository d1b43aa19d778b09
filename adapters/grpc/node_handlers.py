"""Handlers of the calls that admins, runners and proxies make of each other."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import Message

from postroom.adapters.grpc.connections import GrpcConnections
from postroom.adapters.grpc.messages import read_request
from postroom.adapters.grpc.metadata import read_metadata
from postroom.adapters.grpc.methods import Method
from postroom.adapters.grpc.node_access import NodeAccess
from postroom.adapters.grpc.status import DETAILS_KEY, status_code, status_of
from postroom.application.telemetry import logger
from postroom.application.tracing import context_of, correlate, tracer
from postroom.domain.errors import InternalError, PostroomError

CORR_ID_KEY = "x-corr-id"

Context = grpc.aio.ServicerContext[Any, Any]


class NodeCall(NamedTuple):
    """A call.

    Arguments:
        metadata: of the caller, by key.
        trailers: metadata of the answer, to which a handler may add.
    """

    metadata: Mapping[str, str]
    trailers: dict[str, str]


NodeHandler = Callable[[Any, NodeCall], Awaitable[Message]]


class NodeHandlers(grpc.GenericRpcHandler):
    """Handlers of unary calls of one service, which check the node token and turn errors into statuses.

    Arguments:
        handlers: by the name of their method; others answer UNIMPLEMENTED.
        methods: of the service.
        access: what callers are checked by.
        roles: roles of the callers of each method; anybody may call the others.
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
                request_deserializer=None,  # `read_request` does it, whose error has a code
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
            with (
                correlate(metadata.get(CORR_ID_KEY)) as corr_id,
                tracer().serve(method.path[1:], "grpc", context_of(metadata)) as span,
            ):
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
