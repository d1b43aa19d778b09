"""A call that a proxy forwards: its metadata, its answer, and what its failures mean."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import grpc

from postroom.adapters.grpc.metadata import FORWARDED_KEY, MAILBOX_KEY, write_text
from postroom.adapters.grpc.owner_channels import OwnerUnreachable
from postroom.adapters.grpc.status import DETAILS_KEY, detailed_error, status_code, status_of
from postroom.application.cluster.proxy import RETRY_MS, no_owner
from postroom.application.tracing import correlate
from postroom.domain.errors import PostroomError, Unavailable, WrongOwner
from postroom.domain.lease.routing import Route

T = TypeVar("T")

READS = frozenset(
    {
        "backlog",
        "explain",
        "get",
        "get_settings",
        "get_topic_policy",
        "info",
        "list_dead_letters",
        "list_topics",
        "peek",
        "preview_settings",
        "query",
    }
)
"""The methods that change nothing, and so are repeated when their outcome is unknown."""
_CONNECTION_KEYS = frozenset({"user-agent", "content-type", "te", "host", FORWARDED_KEY, MAILBOX_KEY})
"""Metadata that is not passed on, besides that of gRPC itself."""
CORR_ID_KEY = "x-corr-id"
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = Sequence[tuple[str, str | bytes]]


class ForwardedCall:
    """A call to forward.

    Arguments:
        method: its name in `METHODS`.
        path: its name on the wire.
        data: the encoded request.
        metadata: with which it is forwarded.

    Attributes:
        is_answered: the caller has got a part of the answer, so that the call can't be sent again.
    """

    def __init__(
        self, method: str, path: str, data: bytes, context: Context, mailbox: str, metadata: Metadata
    ) -> None:
        self.method = method
        self.path = path
        self.data = data
        self.mailbox = mailbox
        self.is_answered = False
        self._context = context
        self._metadata = metadata

    @property
    def options(self) -> dict[str, Any]:
        """Return the metadata, and what is left of the caller's time."""
        return {"metadata": self._metadata, "timeout": self._context.time_remaining()}

    async def begin_answer(self, initial: Metadata | None) -> None:
        """Pass the initial metadata of the owner on."""
        if passed_on := _passed_on(initial):
            self.is_answered = True
            await self._context.send_initial_metadata(passed_on)

    async def write(self, item: bytes) -> None:
        """Pass an item of a stream on; return when the caller has room for more."""
        self.is_answered = True
        await self._context.write(item)

    def end_answer(self, trailing: Metadata | None) -> None:
        """Pass the trailing metadata of the owner on."""
        self._context.set_trailing_metadata(_passed_on(trailing))

    def may_repeat(self, failure: Exception) -> bool:
        """Return whether the call did nothing, and none of its answer has reached the caller."""
        if self.is_answered:
            return False
        if isinstance(failure, OwnerUnreachable):
            return True
        return _code_of(failure) == WrongOwner.code or (self.method in READS and _is_lost(failure))

    def explain(self, route: Route, failure: Exception) -> Exception:
        """Return the error for the caller: the owner's status, or the reason why it did not respond."""
        owner = f"Runner {route.runner} at {route.address}, which owns mailbox {self.mailbox},"
        if isinstance(failure, OwnerUnreachable):
            return Unavailable(f"{owner} can't be reached; nothing was done. Retry.", RETRY_MS)
        if _is_lost(failure):
            return Unavailable(
                f"{owner} did not answer before the connection ended; whether the command took effect is "
                "unknown.",
                RETRY_MS,
            )
        return no_owner(self.mailbox) if _code_of(failure) == WrongOwner.code else failure


def is_outdated(failure: Exception) -> bool:
    """Return whether the failure of a call may mean that the mailbox has another owner by now."""
    return not isinstance(failure, grpc.aio.AioRpcError) or failure.code() in _LOST


async def within(answer: Awaitable[T]) -> T:
    """Return an answer of an owner.

    Raises: AioRpcError for any status besides OK; Unavailable when this process closed the connection, which
        cancels the calls but not their callers.
    """
    try:
        return await answer
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(
            "The proxy closed the connection to the owner; whether the command took effect is unknown."
        ) from None


async def abort_alike(context: Context, error: grpc.aio.AioRpcError) -> None:
    """End a call with the status of another one."""
    if initial := _passed_on(_pairs(error.initial_metadata())):
        with suppress(grpc.aio.UsageError):  # it was sent before the first item
            await context.send_initial_metadata(initial)
    await context.abort(error.code(), error.details() or "", _passed_on(_pairs(error.trailing_metadata())))


async def refuse(context: Context, failure: PostroomError, caller: Mapping[str, str]) -> None:
    """End a call with an error of this process.

    Arguments:
        caller: metadata of the call.
    """
    with correlate(caller.get(CORR_ID_KEY)) as corr_id:
        status = status_of(failure)
        details = ((DETAILS_KEY, status.SerializeToString()), (CORR_ID_KEY, corr_id))
        await context.abort(status_code(failure), status.message, details)


def forwarded_metadata(pairs: Metadata, mailbox: str) -> Metadata:
    """Return the metadata with which a call is forwarded: its own, the mailbox, and that it is forwarded."""
    return (*_passed_on(pairs), (MAILBOX_KEY, write_text(mailbox)), (FORWARDED_KEY, "1"))


def _passed_on(pairs: Metadata | None) -> Metadata:
    """Return metadata without that of the connection."""
    return tuple(
        (key, value)
        for key, value in pairs or ()
        if key not in _CONNECTION_KEYS and (key == DETAILS_KEY or not key.startswith("grpc-"))
    )


def _pairs(metadata: Any) -> Metadata:
    """Return metadata as the pairs that it is made of."""
    return tuple(metadata or ())


def _code_of(failure: Exception) -> str | None:
    """Return the wire code of an owner's refusal; None for a status of the connection."""
    if not isinstance(failure, grpc.aio.AioRpcError):
        return None
    error = detailed_error(failure.trailing_metadata() or ())
    return None if error is None else error.code


def _is_lost(failure: Exception) -> bool:
    """Return whether the connection ended in the middle of a call."""
    return isinstance(failure, grpc.aio.AioRpcError) and failure.code() in _LOST and _code_of(failure) is None
