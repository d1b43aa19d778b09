"""Errors that a server reported, as the exceptions they were."""

import msgspec

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
_MAX_COUNT = (1 << 53) - 1


def rebuild_error(code: str, message: str, retry_after_ms: int | None) -> PostroomError:
    """Return the exception of an error's wire code (svc-mailbox C-10).

    An unknown code becomes Unavailable if the error may be retried, and Rejected if not; either keeps the
    code. Kinds of Unavailable that concern only the server become Unavailable, too: a client repeats them all
    alike.

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


class ProblemBrief(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why one item of a request was refused; see `Problem`."""

    status: int
    code: str
    message: str
    retry_after_ms: int | None = None
    reason: str | None = None

    @classmethod
    def of(cls, error: PostroomError) -> "ProblemBrief":
        """Return the document of an error of one item."""
        return cls(error.status, error.code, str(error), retry_after_ms(error), reason_of(error))

    def to_error(self) -> PostroomError:
        """Return it as the exception that it was.

        Raises: ValueError for a time that nobody can wait for.
        """
        if self.retry_after_ms is not None and not 0 <= self.retry_after_ms <= _MAX_COUNT:
            raise ValueError(f"retry_after_ms is {self.retry_after_ms}")
        return rebuild_error(self.code, self.message, self.retry_after_ms)

    def to_refusal(self) -> Rejected:
        """Return it as the refusal of one part of a request; raises as `to_error`."""
        error = self.to_error()
        return error if isinstance(error, Rejected) else InvalidRequest(self.message)


def retry_after_ms(error: PostroomError) -> int | None:
    """Return when to retry; None if that can't help."""
    return error.retry_after_ms if isinstance(error, Saturated | Unavailable) else None


def reason_of(error: PostroomError) -> str | None:
    """Return the fault of the capability, if the call was refused for it."""
    return (error.reason or None) if isinstance(error, Unauthenticated | Forbidden) else None
