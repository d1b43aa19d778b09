"""Errors that a server reported, as the exceptions they were."""

from postroom.domain.errors import (
    Forbidden,
    FrameTooLarge,
    IdempotencyConflict,
    IntegrityFailure,
    InternalError,
    InvalidRequest,
    NotFound,
    PostroomError,
    Rejected,
    Saturated,
    StaleMembers,
    StaleReceipt,
    Unauthenticated,
    Unavailable,
    WrongOwner,
)

_REFUSALS: dict[str, type[PostroomError]] = {
    error.code: error
    for error in (
        Forbidden,
        FrameTooLarge,
        IdempotencyConflict,
        IntegrityFailure,
        InternalError,
        InvalidRequest,
        NotFound,
        StaleMembers,
        StaleReceipt,
        Unauthenticated,
    )
}
DEFAULT_RETRY_MS = 1_000


def rebuild_error(code: str, message: str, retry_after_ms: int | None) -> PostroomError:
    """Return the exception of an error's wire code (svc-mailbox C-10).

    An unknown code becomes Unavailable if the error may be retried, and Rejected if not; either keeps the
    code. So do the kinds of Unavailable that concern only the server: a client repeats them all alike.

    Arguments:
        retry_after_ms: pause before a repetition; None if the server gave none.
    """
    retry_ms = DEFAULT_RETRY_MS if retry_after_ms is None else retry_after_ms
    if code == Saturated.code:
        return Saturated(message, retry_ms)
    if code == WrongOwner.code:
        return WrongOwner("", message)
    if code in _REFUSALS:
        return _REFUSALS[code](message)
    may_repeat = retry_after_ms is not None or code == Unavailable.code
    error = Unavailable(message, retry_ms) if may_repeat else Rejected(message)
    error.code = code
    return error
