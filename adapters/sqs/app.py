"""ASGI application that speaks the protocols of Amazon SQS."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final
from uuid import uuid4

import msgspec

from postroom.adapters.sqs import dead_letters, messages, query, queues
from postroom.adapters.sqs.call import Action, Actions, Call
from postroom.adapters.sqs.errors import SqsError, translate, unsupported
from postroom.adapters.sqs.requests import (
    CreateQueue,
    GetQueueAttributes,
    GetQueueUrl,
    ListQueues,
    ListSources,
    QueueRequest,
    SetQueueAttributes,
    TagQueue,
    UntagQueue,
    read,
)
from postroom.adapters.sqs.signature import Request as SignedRequest
from postroom.adapters.sqs.signature import read_signature, verify_signature
from postroom.application.service import Service, Session
from postroom.application.telemetry import logger
from postroom.domain.capability.token import to_access_key
from postroom.domain.errors import FrameTooLarge, PostroomError

JSON: Final = b"application/x-amz-json-1.0"
_TARGET = "AmazonSQS."
_REFUSAL: Final = "postroom.refusal"
_ROUTE: Final = "postroom.route"
_NOT_ACCESS = "Capabilities decide who may use a queue; see `postroom token mint`."
ACTIONS: Actions = {
    **messages.ACTIONS,
    **dead_letters.ACTIONS,
    "CreateQueue": Action(CreateQueue, queues.create_queue),
    "GetQueueUrl": Action(GetQueueUrl, queues.get_queue_url),
    "ListQueues": Action(ListQueues, queues.list_all),
    "ListDeadLetterSourceQueues": Action(ListSources, queues.list_sources),
    "GetQueueAttributes": Action(GetQueueAttributes, queues.get_queue_attributes),
    "SetQueueAttributes": Action(SetQueueAttributes, queues.set_queue_attributes),
    "TagQueue": Action(TagQueue, queues.tag_queue),
    "UntagQueue": Action(UntagQueue, queues.untag_queue),
    "ListQueueTags": Action(QueueRequest, queues.list_queue_tags),
    "PurgeQueue": Action(QueueRequest, queues.purge_queue),
    "DeleteQueue": Action(QueueRequest, queues.delete_queue),
}
UNSUPPORTED: Mapping[str, str] = {
    "AddPermission": _NOT_ACCESS,
    "RemovePermission": _NOT_ACCESS,
}
"""Actions that are refused, and the reasons."""
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder().decode


class SqsApp:
    """ASGI application of a service; the server bounds the requests.

    Arguments:
        scheme: of the URLs of queues.
    """

    def __init__(self, service: Service, scheme: str) -> None:
        self._service = service
        self._scheme = scheme

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request."""
        headers = dict(scope["headers"])
        request_id, is_json = str(uuid4()), b"x-amz-target" in headers
        try:
            if _REFUSAL in scope:
                raise scope[_REFUSAL]
            body = await _read(receive) if scope["method"] == "POST" else b""
            name, answer = await self._answer(scope, headers, body, is_json=is_json)
        except SqsError as error:
            await _refuse(send, error, request_id, is_json=is_json)
        except FrameTooLarge as error:
            await _refuse(
                send, SqsError("RequestEntityTooLarge", str(error), 413), request_id, is_json=is_json
            )
        except PostroomError as error:
            self._service.metrics.refused(error)
            await _refuse(send, translate(error), request_id, is_json=is_json)
        except Exception:
            logger().exception("sqs.request_failed")
            failure = SqsError("InternalFailure", "The request failed because of a defect.", 500)
            await _refuse(send, failure, request_id, is_json=is_json)
        else:
            text = _encode(answer) if is_json else query.write_answer(name, answer, request_id)
            await _reply(send, 200, text, request_id, is_json=is_json)

    async def _answer(
        self, scope: Any, headers: Mapping[bytes, bytes], body: bytes, *, is_json: bool
    ) -> tuple[str, Any]:
        form: dict[str, str] = {}
        if is_json:
            name = headers[b"x-amz-target"].decode("latin-1")
            if not name.startswith(_TARGET):
                raise SqsError(
                    "UnknownOperationException", f"The action {name[:80]} is not one of AmazonSQS."
                )
            name = name.removeprefix(_TARGET)
        else:
            form = query.read_form(body or scope["query_string"])
            name = form.get("Action", "")
            if not name:
                raise SqsError("MissingAction", "The request must contain the parameter Action.")
        scope[_ROUTE] = f"/{name}" if name in ACTIONS else "/other"
        session = await self._open_session(scope, body)
        if name in UNSUPPORTED:
            raise unsupported(UNSUPPORTED[name])
        action = ACTIONS.get(name)
        if action is None:
            raise SqsError(
                "UnknownOperationException", f"The action {name[:80]} is not valid for this endpoint."
            )
        if is_json:
            request = read(_parse(body), action.request)
        else:
            parameters = query.read_parameters(name, form)
            if "QueueUrl" in action.request.__struct_encode_fields__ and "QueueUrl" not in parameters:
                parameters["QueueUrl"] = scope["path"]
            request = read(parameters, action.request, is_text=True)
        host = headers.get(b"host", b"localhost").decode("latin-1")
        closed: asyncio.Event = scope["state"]["connection"].closed
        call = Call(session.mailbox, session.grant, self._service, f"{self._scheme}://{host}", closed)
        return name, await action.handler(call, request)

    async def _open_session(self, scope: Any, body: bytes) -> Session:
        """Return the session of the access key that signed a request; with `--dev`, nobody needs one."""
        connection, find_token = scope["state"]["connection"], self._service.find_token
        if find_token is None:
            session = await self._service.open_session(None)
        else:
            connection.set_authenticated(False)
            request = SignedRequest(
                scope["method"],
                scope["raw_path"].decode("latin-1"),
                scope["query_string"].decode("latin-1"),
                [(name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]],
                body,
            )
            signature = read_signature(request, time.time())
            token = await find_token(signature.key)
            verify_signature(request, signature, to_access_key(token).secret)
            session = await self._service.open_session(token.encode())
        connection.set_authenticated(True)
        return session


def _parse(body: bytes) -> Any:
    try:
        return _decode(body or b"{}")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SqsError("SerializationException", f"The body is no JSON: {error}.") from None


async def _read(receive: Any) -> bytes:
    message = await receive()
    body: bytes = message.get("body", b"")
    return body


async def _refuse(send: Any, error: SqsError, request_id: str, *, is_json: bool) -> None:
    if not is_json:
        await _reply(send, error.status, query.write_error(error, request_id), request_id, is_json=False)
        return
    text = _encode({"__type": f"com.amazonaws.sqs#{error.name}", "message": error.message})
    own = [(b"x-amzn-query-error", f"{error.code};{error.fault}".encode())]
    await _reply(send, error.status, text, request_id, is_json=True, headers=own)


async def _reply(
    send: Any,
    status: int,
    body: bytes,
    request_id: str,
    *,
    is_json: bool,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    sent = [
        (b"content-type", JSON if is_json else b"text/xml"),
        (b"content-length", str(len(body)).encode()),
        (b"x-amzn-requestid", request_id.encode()),
        *(headers or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": sent})
    await send({"type": "http.response.body", "body": body})
