"""The OpenAPI 3.1 document of the calls, made from their types."""

from collections.abc import Sequence
from http import HTTPStatus
from inspect import cleandoc
from typing import Any

import msgspec

from postroom.adapters.http_server import problems
from postroom.adapters.http_server.routes import HttpRoute
from postroom.application.cloudevents import STRUCTURED
from postroom.application.operations import contract
from postroom.application.version import own_version

DESCRIPTION = (
    "Send, receive and settle messages of one mailbox. Payloads are base64. Every answer has `X-Corr-Id`: "
    "the caller's, or a new UUIDv7. Refusals are problem documents (RFC 9457) with a `code`; 429 and 503 "
    "have `Retry-After`. Calls carry a capability as bearer token: without a valid one they are refused with "
    "401, beyond its rights with 403. Servers that ask for none (`--dev`) say so by `X-Postroom-Mode: dev`."
)
_ALWAYS = (400, 403, 421, 429, 500, 503)
_WITH_BODY = (408, 413, 415)
_REF = "#/components/schemas/{name}"


def make_document(routes: Sequence[HttpRoute]) -> dict[str, Any]:
    """Return the document."""
    kinds = [kind for route in routes for kind in _kinds(route.answer)]
    kinds += [route.body for route in routes if route.body is not None]
    kinds += [problems.Problem, contract.Envelope, contract.Heartbeat, contract.StreamError]
    shapes, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    for component in components.values():
        if "description" in component:  # Python removes the indentation from 3.13 on
            component["description"] = cleandoc(component["description"])
    by_kind = {id(kind): shape for kind, shape in zip(kinds, shapes, strict=True)}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, by_kind)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Postroom", "version": own_version(), "description": DESCRIPTION},
        "paths": paths,
        "security": [{"capability": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "capability": {"type": "http", "scheme": "bearer", "description": "A capability."}
            },
        },
    }


def _operation(route: HttpRoute, shapes: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.handler.__name__,
        "summary": route.summary,
        "parameters": [*_path_parameters(route), *_query_parameters(route), _CORR_ID],
        "responses": _responses(route, shapes),
    }
    if route.is_public:
        operation["security"] = []
    if route.path == "/v1/send":
        operation["parameters"].append(_IDEMPOTENCY_MODE)
    if route.body is not None:
        content: dict[str, Any] = {"schema": shapes[id(route.body)]}
        if route.examples[0] is not None:
            content["example"] = route.examples[0]
        operation["requestBody"] = {
            "required": not route.body_is_optional,
            "content": {"application/json": content},
        }
    if route.takes_cloud_events:
        operation["requestBody"]["content"][STRUCTURED] = {"schema": {"type": "object"}}
    return operation


def _responses(route: HttpRoute, shapes: dict[int, Any]) -> dict[str, Any]:
    media, shape = "application/json", dict[str, Any]()
    if type(route.answer) is str:
        media = route.answer
        shape = {"type": "object"} if media == "application/json" else {"type": "string"}
    else:
        choices = [shapes[id(kind)] for kind in _kinds(route.answer)]
        shape = choices[0] if len(choices) == 1 else {"anyOf": choices}
    content: dict[str, Any] = {"schema": shape}
    if route.examples[1] is not None:
        content["example"] = route.examples[1]
    responses: dict[str, Any] = {
        "200": {"description": "Done.", "headers": _CORR_ID_HEADER, "content": {media: content}}
    }
    statuses = {*_ALWAYS, *route.refusals, *(_WITH_BODY if route.body is not None else ())}
    for status in sorted(statuses if route.is_public else {*statuses, 401}):
        responses[str(status)] = _refusal(status)
    if route.path == "/readyz":
        responses["503"] = responses["200"] | {"description": "Parts are missing."}
    return responses


def _kinds(answer: Any) -> tuple[Any, ...]:
    """Return the types of an answer in JSON."""
    return () if type(answer) is str else answer if type(answer) is tuple else (answer,)


def _refusal(status: int) -> dict[str, Any]:
    headers = dict(_CORR_ID_HEADER)
    if status in (429, 503):
        headers["Retry-After"] = {"schema": {"type": "integer"}, "description": "Seconds."}
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = {"schema": {"type": "string"}, "description": "`Bearer`."}
    media = {problems.TYPE.decode(): {"schema": {"$ref": _REF.format(name="Problem")}}}
    # Python before 3.13 has the phrase of RFC 7231.
    phrase = "Content Too Large" if status == 413 else HTTPStatus(status).phrase
    return {"description": f"{phrase}.", "headers": headers, "content": media}


def _path_parameters(route: HttpRoute) -> list[dict[str, Any]]:
    return [
        {
            "name": segment[1:-1],
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "maxLength": 255},
        }
        for segment in route.segments
        if segment.startswith("{")
    ]


def _query_parameters(route: HttpRoute) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    _, components = msgspec.json.schema_components([route.query], ref_template=_REF)
    shape = components[route.query.__name__]
    return [
        {
            "name": name,
            "in": "query",
            "required": name in shape.get("required", ()),
            "schema": {key: value for key, value in field.items() if key not in ("default", "description")},
        }
        | ({"style": "deepObject", "explode": True} if field.get("type") == "object" else {})
        | ({"description": field["description"]} if "description" in field else {})
        for name, field in shape["properties"].items()
    ]


_CORR_ID = {
    "name": "X-Corr-Id",
    "in": "header",
    "required": False,
    "description": "Correlation id of the request.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[!-~]+$"},
}
_IDEMPOTENCY_MODE = {
    "name": "X-Idempotency-Mode",
    "in": "header",
    "required": False,
    "description": "Answer duplicates with 409.",
    "schema": {"type": "string", "enum": ["409-conflict"]},
}
_CORR_ID_HEADER = {"X-Corr-Id": {"schema": {"type": "string"}, "description": "Correlation id."}}
