"""Exceptions of Postroom, with their wire codes (svc-mailbox C-10).

    PostroomError
    ├── Rejected                   a command was refused and changed nothing
    │   ├── InvalidRequest         400 E_SCHEMA
    │   │   ├── WrongMode          400 E_SCHEMA, the mailbox has another mode
    │   │   └── SettingsConflict   400 E_SCHEMA, the mailbox has other settings
    │   ├── Unauthenticated        401 E_CAP_AUTH
    │   ├── Forbidden              403 E_CAP_SCOPE
    │   ├── NotFound               404 E_NOT_FOUND
    │   ├── IdempotencyConflict    409 E_DUPLICATE
    │   ├── StaleReceipt           409 E_STALE_RECEIPT
    │   ├── LeaseHeld              409 E_LEASE_HELD, another runner has the lease
    │   ├── LeaseLost              409 E_LEASE_LOST, the runner no longer has the lease
    │   ├── WrongOwner             421 E_WRONG_OWNER, this process does not own the mailbox
    │   ├── StaleMembers           421 E_STALE_MEMBERS, the namespace has more mailboxes than the caller knows
    │   ├── FrameTooLarge          413 E_FRAME_TOO_LARGE
    │   ├── InvalidOutboxEvent     400 INVALID_OUTBOX
    │   ├── FutureEvent            400 FUTURE_EVENT
    │   ├── DuplicateInboxMessage  409 DUPLICATE_MESSAGE
    │   ├── InvalidTimestamp       400 INVALID_TIMESTAMP
    │   ├── PoisonMessage          422 E_POISON
    │   ├── InternalError          500 E_INTERNAL, a defect of Postroom
    │   └── Saturated              429 E_SATURATED, with retry_after_ms
    ├── IntegrityFailure           422 E_INTEGRITY
    │   └── BrokenLog              422 E_INTEGRITY, the log itself was altered
    ├── ImplausibleClock           503 E_CLOCK, the wall clock is implausibly far ahead
    ├── BrokenProjection           500 E_PROJECTION, a defect in the code of a read model
    └── Unavailable                503 E_UNAVAILABLE, with retry_after_ms
        ├── MailboxClosed          503 E_UNAVAILABLE, this process closed it
        ├── UnusableServer         503 E_UNAVAILABLE, until rights, settings or tables are changed
        │   └── UnusableStore      503 E_STORE, until the store's format or file is mended
        ├── MailboxOwned           503 E_OWNED, another process owns the mailbox
        ├── DuplicateRecord        503 E_UNAVAILABLE, the log has the record's version of its stream
        ├── WrongPosition          503 E_WRONG_POSITION, another process appended
        └── Fenced                 503 E_FENCED, a newer owner took over the log
            └── StoreReplaced      503 E_FENCED, the file of the store is another one now

The text of an error says what was wrong, where, and what to do. Codes may be added, and keep their meaning.
"""

import copyreg
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

import msgspec


class PostroomError(Exception):
    """Base class of all Postroom errors, with the wire `code` and the HTTP `status` (svc-mailbox C-10)."""

    code = "E_UNAVAILABLE"
    status = 503
    is_counted = False
    """Whether the owner of a mailbox counted it for the metric `rejected_total`."""

    def __reduce__(self) -> str | tuple[Any, ...]:
        # By default a copy is made by `__init__(*args)`, but `args` is only the text.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class Rejected(PostroomError):
    """A command was refused: no event was recorded and no state changed."""

    code = "E_SCHEMA"
    status = 400


class InvalidRequest(Rejected):
    """The request is malformed or out of bounds (svc-mailbox C-10 `E_SCHEMA`)."""


class WrongMode(InvalidRequest):
    """A mailbox was opened in a mode that differs from its own, `actual`."""

    def __init__(self, mailbox: str, actual: str, expected: str) -> None:
        super().__init__(
            f"Mailbox {mailbox} has the mode {actual}, not {expected}; open it in that mode, or name another "
            "mailbox."
        )
        self.actual = actual


class Difference(NamedTuple):
    """A setting of a mailbox, such as `policy.max_attempts`: the value that is stored, and the caller's."""

    name: str
    stored: object
    argument: object


class SettingsConflict(InvalidRequest):
    """A mailbox was opened with settings that differ from its own.

    Arguments:
        differences: at least one.
    """

    def __init__(self, mailbox: str, differences: Sequence[Difference]) -> None:
        self.mailbox = mailbox
        self.differences = changes = tuple(Difference(*each) for each in differences)
        texts = [f"{name} is {show_setting(old)}, not {show_setting(new)}" for name, old, new in changes]
        where = "" if mailbox == "main@local" else f" --mailbox {mailbox}"  # the default of commands
        change = f"run `postroom apply{where}` with a settings file that has them"
        if not any(each.name.startswith("erasure.") for each in changes):
            words = " ".join(
                f"--unset {quote(name)}" if argument is None else quote(f"{name}={show_setting(argument)}")
                for name, _, argument in changes
            )
            change = f"run `postroom mailbox set{where} {words}` or `postroom apply{where}`"
        super().__init__(
            f"Mailbox {mailbox} has other settings than those given: {'; '.join(texts)}. Leave them out to "
            f"use what is stored; to change it, {change}."
        )


def show_setting(value: object) -> str:
    """Return a value as the command line has it: weights as `a:3,b:2`, or JSON if a key has a comma."""
    if isinstance(value, Mapping):
        text = ",".join(f"{key}:{weight}" for key, weight in value.items())
        is_plain = value and not text.startswith("{") and not any("," in key for key in value)
        return text if is_plain else msgspec.json.encode(value).decode()
    return "unset" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


class Unauthenticated(Rejected):
    """The request has no valid capability (svc-mailbox C-10 `E_CAP_AUTH`).

    Arguments:
        reason: for programs: `missing`, `malformed`, `signature`, `caveat`, `expired`, `not-yet-valid` or
            `revoked`; empty where it is unknown.
    """

    code = "E_CAP_AUTH"
    status = 401

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class Forbidden(Rejected):
    """The capability does not cover this operation or topic (svc-mailbox C-10 `E_CAP_SCOPE`).

    Arguments:
        reason: for programs: `mailbox`, `operation`, `topic` or `messages`; empty where it is unknown.
    """

    code = "E_CAP_SCOPE"
    status = 403

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class NotFound(Rejected):
    """The mailbox, topic or message named in the request does not exist."""

    code = "E_NOT_FOUND"
    status = 404


class IdempotencyConflict(Rejected):
    """An idempotency key was reused with another payload within the replay window (svc-mailbox I-2, I-13)."""

    code = "E_DUPLICATE"
    status = 409


class StaleReceipt(Rejected):
    """The receipt is of a delivery that has ended (svc-mailbox I-3)."""

    code = "E_STALE_RECEIPT"
    status = 409


class LeaseHeld(Rejected):
    """The lease of a mailbox is held by another runner (RFC-049 Lease Acquisition).

    Arguments:
        remaining_ms: until the lease expires if it is not renewed, as an admin sees it; None if unknown.
    """

    code = "E_LEASE_HELD"
    status = 409

    def __init__(self, mailbox: str, runner: str, remaining_ms: int | None = None) -> None:
        super().__init__(f"Mailbox {mailbox} is leased by {runner}; wait until it is released or expires.")
        self.mailbox = mailbox
        self.runner = runner
        self.remaining_ms = remaining_ms


class LeaseLost(Rejected):
    """A runner does not have, or no longer has, the lease of a mailbox (RFC-049 Heartbeat Processing).

    Arguments:
        reason: what became of the lease, as the end of a sentence without a full stop.
    """

    code = "E_LEASE_LOST"
    status = 409

    def __init__(self, mailbox: str, reason: str) -> None:
        super().__init__(
            f"The lease of mailbox {mailbox} was not renewed: {reason}; stop serving it, or acquire it again."
        )
        self.mailbox = mailbox
        self.reason = reason


class WrongOwner(Rejected):
    """A call named a mailbox that this process does not own; refresh its route and call the owner.

    Arguments:
        message: the text of a server's error; by default it is made for this process.
    """

    code = "E_WRONG_OWNER"
    status = 421

    def __init__(self, mailbox: str, message: str | None = None) -> None:
        super().__init__(
            message or f"This process does not own mailbox {mailbox}; refresh its route and call the owner."
        )
        self.mailbox = mailbox


class StaleMembers(Rejected):
    """The caller chose a mailbox from a list of the namespace's mailboxes that lacks newer ones."""

    code = "E_STALE_MEMBERS"
    status = 421


class FrameTooLarge(Rejected):
    """The message exceeds the maximum frame size (svc-mailbox I-6)."""

    code = "E_FRAME_TOO_LARGE"
    status = 413


class InvalidOutboxEvent(Rejected):
    """An outbox event has no id or no type (SDS-047 POL-047-001)."""

    code = "INVALID_OUTBOX"


class FutureEvent(Rejected):
    """An outbox event's `occurred_at` is in the future (SDS-047 POL-047-002)."""

    code = "FUTURE_EVENT"


class DuplicateInboxMessage(Rejected):
    """The inbox already has a message with this id (SDS-047 POL-047-003)."""

    code = "DUPLICATE_MESSAGE"
    status = 409


class InvalidTimestamp(Rejected):
    """The processing time of an inbox message is before its receive time (SDS-047 POL-047-004)."""

    code = "INVALID_TIMESTAMP"


class PoisonMessage(Rejected):
    """A handler reported that it can never process a message (SDS-047 POL-047-006)."""

    code = "E_POISON"
    status = 422


class InternalError(Rejected):
    """A command failed because of a defect in Postroom; the traceback is logged."""

    code = "E_INTERNAL"
    status = 500


class Saturated(Rejected):
    """A limit is reached; retry after `retry_after_ms` (svc-mailbox I-5)."""

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
    """The log's hash chain is broken at `position`: a commit was removed, moved or altered."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


class BrokenProjection(PostroomError):
    """The fold of a read model failed, or returned rows that its projection does not declare."""

    code = "E_PROJECTION"
    status = 500


class ImplausibleClock(PostroomError):
    """The wall clock is implausibly far ahead of the last record; opening could expire messages."""

    code = "E_CLOCK"


class Unavailable(PostroomError):
    """The store or the mailbox is temporarily unavailable; the outcome of a pending command is unknown."""

    def __init__(self, message: str, retry_after_ms: int = 1_000) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class MailboxClosed(Unavailable):
    """A mailbox was used after this process closed it; only opening it again helps."""


class UnusableServer(Unavailable):
    """A server or store can't be used until rights, settings or tables are changed; a retry doesn't help."""


class UnusableStore(UnusableServer):
    """A store has another version's format, an unfinished restore, or a file of another owner or mode."""

    code = "E_STORE"


class MailboxOwned(Unavailable):
    """Another process, `owner`, owns the mailbox."""

    code = "E_OWNED"

    def __init__(self, mailbox: str, owner: str) -> None:
        super().__init__(
            f"Mailbox {mailbox} is owned by {owner or 'another process'}; "
            "use connect() to call that process, stop it, or use another mailbox."
        )
        self.owner = owner


class DuplicateRecord(Unavailable):
    """An append had a record whose version its stream already has; nothing was appended."""


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
    """A newer owner took over the mailbox; this owner, of an older epoch, can no longer write."""

    code = "E_FENCED"

    def __init__(self, mailbox: str, epoch: int, newer: int) -> None:
        super().__init__(
            f"Mailbox {mailbox} was taken over by epoch {newer} while this process held epoch {epoch}; "
            "open the mailbox again to continue."
            if newer > epoch
            else f"Mailbox {mailbox} was opened with epoch {epoch} before; acquire its lease again."
        )
        self.epoch = epoch
        self.newer = newer


class StoreReplaced(Fenced):
    """The file of the store was removed or replaced; this owner would write where nobody reads."""

    def __init__(self, mailbox: str, path: object) -> None:
        Unavailable.__init__(
            self,
            f"The file {path} was removed or replaced while this process owned mailbox {mailbox}; open the "
            "mailbox again to use the file that is there now.",
        )
