"""Every error that Postroom raises on purpose, with the wire code that svc-mailbox C-10 gives it.

    PostroomError
    ├── Rejected                   a command was refused and left no trace
    │   ├── InvalidRequest         400 E_SCHEMA
    │   ├── Unauthenticated        401 E_CAP_AUTH
    │   ├── Forbidden              403 E_CAP_SCOPE
    │   ├── NotFound               404 E_NOT_FOUND
    │   ├── IdempotencyConflict    409 E_DUPLICATE
    │   ├── StaleReceipt           409 E_STALE_RECEIPT
    │   ├── FrameTooLarge          413 E_FRAME_TOO_LARGE
    │   ├── InvalidOutboxEvent     400 INVALID_OUTBOX
    │   ├── FutureEvent            400 FUTURE_EVENT
    │   ├── DuplicateInboxMessage  409 DUPLICATE_MESSAGE
    │   ├── InvalidTimestamp       400 INVALID_TIMESTAMP
    │   ├── PoisonMessage          422 E_POISON
    │   └── Saturated              429 E_SATURATED, with retry_after_ms
    ├── IntegrityFailure           422 E_INTEGRITY
    │   └── BrokenLog              422 E_INTEGRITY, the log itself was altered
    ├── BrokenProjection           500 E_PROJECTION, the code of a read model is at fault
    └── Unavailable                503 E_UNAVAILABLE, with retry_after_ms
        ├── MailboxOwned           503 E_OWNED, another process owns the mailbox
        ├── WrongPosition          503 E_WRONG_POSITION, somebody else appended
        └── Fenced                 503 E_FENCED, a newer owner took the log over

A message is one sentence that says what was wrong, where, and what to do about it. Codes are
only ever added, never given another meaning.
"""


class PostroomError(Exception):
    """Root of every error raised on purpose; carries `code` and the HTTP `status` (svc-mailbox C-10)."""

    code = "E_UNAVAILABLE"
    status = 503


class Rejected(PostroomError):
    """A command was refused: no event was recorded and no state changed."""

    code = "E_SCHEMA"
    status = 400


class InvalidRequest(Rejected):
    """The request itself is malformed or outside its limits (svc-mailbox C-10 `E_SCHEMA`)."""


class Unauthenticated(Rejected):
    """No valid capability came with the request (svc-mailbox C-10 `E_CAP_AUTH`)."""

    code = "E_CAP_AUTH"
    status = 401


class Forbidden(Rejected):
    """The capability does not cover this operation or topic (svc-mailbox C-10 `E_CAP_SCOPE`)."""

    code = "E_CAP_SCOPE"
    status = 403


class NotFound(Rejected):
    """The mailbox, topic or message named in the request does not exist."""

    code = "E_NOT_FOUND"
    status = 404


class IdempotencyConflict(Rejected):
    """An idempotency key came back with another payload inside its window (svc-mailbox I-2, I-13)."""

    code = "E_DUPLICATE"
    status = 409


class StaleReceipt(Rejected):
    """The receipt is of a delivery that is over: it expired and the message moved on (svc-mailbox I-3)."""

    code = "E_STALE_RECEIPT"
    status = 409


class FrameTooLarge(Rejected):
    """The message is larger than a frame may be (svc-mailbox I-6)."""

    code = "E_FRAME_TOO_LARGE"
    status = 413


class InvalidOutboxEvent(Rejected):
    """An outbox event lacks its id or its type (SDS-047 POL-047-001)."""

    code = "INVALID_OUTBOX"


class FutureEvent(Rejected):
    """An outbox event says that it occurred in the future (SDS-047 POL-047-002)."""

    code = "FUTURE_EVENT"


class DuplicateInboxMessage(Rejected):
    """The inbox has a message of this id already (SDS-047 POL-047-003)."""

    code = "DUPLICATE_MESSAGE"
    status = 409


class InvalidTimestamp(Rejected):
    """An inbox message would have been processed before it was received (SDS-047 POL-047-004)."""

    code = "INVALID_TIMESTAMP"


class PoisonMessage(Rejected):
    """A handler says that it never will be able to deal with a message (SDS-047 POL-047-006)."""

    code = "E_POISON"
    status = 422


class Saturated(Rejected):
    """A bounded structure is full; try again after `retry_after_ms` (svc-mailbox I-5)."""

    code = "E_SATURATED"
    status = 429

    def __init__(self, message: str, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class IntegrityFailure(PostroomError):
    """Stored bytes do not match the hash recorded for them (svc-mailbox I-7, I-12)."""

    code = "E_INTEGRITY"
    status = 422


class BrokenLog(IntegrityFailure):
    """The log's hash chain does not hold at `position`: a record was cut, moved or edited."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class BrokenProjection(PostroomError):
    """The fold of a read model failed, or made rows that its projection does not declare."""

    code = "E_PROJECTION"
    status = 500


class Unavailable(PostroomError):
    """The store or the mailbox can't serve right now; the outcome of a pending command is unknown."""

    def __init__(self, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MailboxOwned(Unavailable):
    """Another process owns the mailbox; `owner` says who."""

    code = "E_OWNED"

    def __init__(self, mailbox: str, owner: str) -> None:
        super().__init__(
            f"Mailbox {mailbox} is owned by {owner or 'another process'}; "
            "stop that process, send through it, or use another mailbox."
        )
        self.owner = owner


class WrongPosition(Unavailable):
    """An append expected the log to end at `expected`, but it ends at `actual`."""

    code = "E_WRONG_POSITION"

    def __init__(self, mailbox: str, expected: int, actual: int) -> None:
        super().__init__(
            f"Append to mailbox {mailbox} expected position {expected}, but its log ends at {actual}; "
            "open the mailbox again."
        )
        self.expected = expected
        self.actual = actual


class Fenced(Unavailable):
    """A newer owner took the mailbox over: this one, of an older epoch, can write no more."""

    code = "E_FENCED"

    def __init__(self, mailbox: str, epoch: int, newer: int) -> None:
        super().__init__(
            f"Mailbox {mailbox} was taken over by epoch {newer} while this process held epoch {epoch}; "
            "open the mailbox again to go on."
        )
        self.epoch = epoch
        self.newer = newer
