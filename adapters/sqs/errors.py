"""Errors of Amazon SQS: their names in both protocols, and their HTTP statuses."""

from postroom.domain.errors import (
    Forbidden,
    FrameTooLarge,
    IdempotencyConflict,
    NotFound,
    PostroomError,
    Rejected,
    Saturated,
    StaleReceipt,
    Unauthenticated,
)

_QUERY_PREFIX = "AWS.SimpleQueueService."
_SERVICE_FAULT = 500
_QUERY_CODES = {
    "QueueDoesNotExist": _QUERY_PREFIX + "NonExistentQueue",
    "QueueNameExists": "QueueAlreadyExists",
    "MissingRequiredParameterException": "MissingParameter",
    "InvalidParameterValueException": "InvalidParameterValue",
    "UnknownOperationException": "InvalidAction",
    "AccessDeniedException": "AccessDenied",
    **{
        name: _QUERY_PREFIX + name
        for name in (
            "BatchEntryIdsNotDistinct",
            "BatchRequestTooLong",
            "EmptyBatchRequest",
            "InvalidBatchEntryId",
            "MessageNotInflight",
            "TooManyEntriesInBatchRequest",
            "UnsupportedOperation",
        )
    },
}
"""Codes of the query protocol that differ from the names of the JSON protocol."""


class SqsError(Exception):
    """A refused request.

    Arguments:
        name: its shape in the JSON protocol.
        message: what was wrong.
    """

    def __init__(self, name: str, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.name = name
        self.message = message.encode(errors="replace").decode()  # an escape of JSON may be a surrogate
        self.status = status

    @property
    def code(self) -> str:
        """Return its code in the query protocol, which batches have in both."""
        return _QUERY_CODES.get(self.name, self.name)

    @property
    def fault(self) -> str:
        """Return who is at fault, `Sender` or `Receiver`."""
        return "Receiver" if self.status >= _SERVICE_FAULT else "Sender"


def invalid_value(name: str, value: object, reason: str) -> SqsError:
    """Return the error of a parameter with a value that is not permitted."""
    shown = str(value)[:120]
    return SqsError(
        "InvalidParameterValueException", f"Value {shown} for parameter {name} is invalid. Reason: {reason}"
    )


def missing(name: str) -> SqsError:
    """Return the error of a request without a required parameter."""
    return SqsError("MissingRequiredParameterException", f"The request must contain the parameter {name}.")


def invalid_attribute(name: str, reason: str = "") -> SqsError:
    """Return the error of a queue attribute with a value that is not permitted."""
    return SqsError("InvalidAttributeValue", f"Invalid value for the parameter {name}. {reason}".rstrip())


def unsupported(message: str) -> SqsError:
    """Return the error for a feature that this server does not support."""
    return SqsError("UnsupportedOperation", message)


def translate(error: PostroomError) -> SqsError:
    """Return a refusal of the mailbox as an error of SQS."""
    message = str(error)
    match error:
        case _ if isinstance(error, Forbidden) or error.status == Forbidden.status:
            return SqsError("AccessDeniedException", message, 403)
        case Unauthenticated():
            return SqsError("InvalidClientTokenId", message, 403)
        case StaleReceipt() | NotFound():
            return invalid_value("ReceiptHandle", "", f"The receipt handle has expired. {message}")
        case IdempotencyConflict():
            return invalid_value("MessageDeduplicationId", "", message)
        case Saturated():
            return SqsError("RequestThrottled", message, 403)
        case FrameTooLarge():
            return SqsError(
                "InvalidParameterValueException", f"One or more parameters are invalid. Reason: {message}"
            )
        case Rejected():
            return SqsError("InvalidParameterValueException", message)
    return SqsError("ServiceUnavailable", message, 503)
