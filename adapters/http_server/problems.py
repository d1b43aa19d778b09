"""Problem documents (RFC 9457) of refused requests, with the codes of svc-mailbox C-10."""

from http import HTTPStatus

import msgspec
import uuid_utils

from postroom.application.error_reference import HTTP_FOLDER
from postroom.application.remote_errors import reason_of, retry_after_ms
from postroom.domain.errors import InvalidRequest, PostroomError, Rejected

TYPE = b"application/problem+json"


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Problem document of a refused request.

    Arguments:
        title: the status in words.
        type: path on this server of a page about the code.
        code: what was wrong, for programs; the meaning of a code never changes.
        message: what was wrong, where, and what to do.
        retry_after_ms: when to retry; absent if repeating the request can't help.
        message_id, msg_id: id of the original message, if a send was refused as a duplicate.
        reason: what is wrong with the capability, for programs, such as `expired`, `revoked` or `topic`.
    """

    title: str
    status: int
    code: str
    message: str
    corr_id: str
    type: str = "about:blank"
    retry_after_ms: int | None = None
    message_id: str | None = None
    msg_id: str | None = None
    reason: str | None = None


class MethodNotAllowed(InvalidRequest):
    """The resource has no such method; `allow` lists those that it has."""

    code = "E_METHOD"
    status = 405

    def __init__(self, method: str, path: str, allow: str) -> None:
        super().__init__(f"{path} does not accept {method}; use {allow}.")
        self.allow = allow


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared to be JSON, or has a content coding, such as gzip."""

    code = "E_MEDIA_TYPE"
    status = 415


class ForeignHost(Rejected):
    """The Host header is not a loopback name, as when a web page rebinds its name to this machine."""

    code = "E_HOST"
    status = 421


class ForeignOrigin(Rejected):
    """The Origin header names a web page, whose requests are forgeries (CSRF)."""

    code = "E_ORIGIN"
    status = 403


class DuplicateMessage(Rejected):
    """A send was a duplicate of `message_id`, and the caller asked for a conflict (`X-Idempotency-Mode`)."""

    code = "E_DUPLICATE"
    status = 409

    def __init__(self, message_id: str) -> None:
        super().__init__(f"Message {message_id} was sent before with the same idempotency key or id.")
        self.message_id = message_id


def problem(error: PostroomError, corr_id: str) -> Problem:
    """Return the document of an error."""
    original = error.message_id if isinstance(error, DuplicateMessage) else None
    return Problem(
        HTTPStatus(error.status).phrase,
        error.status,
        error.code,
        str(error),
        corr_id,
        HTTP_FOLDER + error.code,
        retry_after_ms=retry_after_ms(error),
        message_id=original,
        msg_id=original,
        reason=reason_of(error),
    )


def retry_after(milliseconds: int) -> bytes:
    """Return the value of `Retry-After`: whole seconds, rounded up, at least one."""
    return str(max(1, -(-milliseconds // 1_000))).encode()


def refusal_of(
    status: int, code: str, message: str, fields: bytes, retry_after_ms: int | None = None
) -> bytes:
    """Return the answer to a request that has not reached the application, after which its connection ends.

    Arguments:
        fields: header fields of every answer.
    """
    title, corr_id = HTTPStatus(status).phrase, str(uuid_utils.uuid7())
    document = Problem(title, status, code, message, corr_id, HTTP_FOLDER + code, retry_after_ms)
    body = msgspec.json.encode(document)
    retry = b"retry-after: %b\r\n" % retry_after(retry_after_ms) if retry_after_ms else b""
    return b"HTTP/1.1 %d %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n" % (
        status,
        title.encode(),
        TYPE,
        len(body),
    ) + b"x-corr-id: %b\r\nconnection: close\r\n%b%b\r\n%b" % (corr_id.encode(), retry, fields, body)
