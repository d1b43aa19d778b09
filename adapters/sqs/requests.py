"""Requests and answers of Amazon SQS; their fields are named as in its reference."""

from typing import Any

import msgspec
from msgspec import field

from postroom.adapters.sqs.errors import SqsError, missing


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="pascal"):
    """Parameters of an action; those that are required are checked by it."""


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="pascal"):
    """Answer of an action."""


class Empty(Answer, frozen=True):
    """Answer of an action without a result."""


class QueueRequest(Request, frozen=True):
    """Request of an action on one queue."""

    queue_url: str = ""


class CreateQueue(Request, frozen=True):
    """Request to create a queue."""

    queue_name: str = ""
    attributes: dict[str, str] = {}
    tags: dict[str, str] = field(name="tags", default_factory=dict)


class GetQueueUrl(Request, frozen=True):
    """Request for the URL of a queue."""

    queue_name: str = ""
    queue_owner_a_w_s_account_id: str | None = field(name="QueueOwnerAWSAccountId", default=None)


class ListQueues(Request, frozen=True):
    """Request for a page of queues."""

    queue_name_prefix: str = ""
    max_results: int | None = None
    next_token: str | None = None


class ListSources(QueueRequest, frozen=True):
    """Request for a page of the source queues of a dead-letter queue."""

    max_results: int | None = None
    next_token: str | None = None


class GetQueueAttributes(QueueRequest, frozen=True):
    """Request for attributes of a queue."""

    attribute_names: list[str] = []


class SetQueueAttributes(QueueRequest, frozen=True):
    """Request to change attributes of a queue."""

    attributes: dict[str, str] = {}


class TagQueue(QueueRequest, frozen=True):
    """Request to set tags."""

    tags: dict[str, str] = {}


class UntagQueue(QueueRequest, frozen=True):
    """Request to remove tags."""

    tag_keys: list[str] = []


class Attribute(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, rename="pascal"):
    """Value of a message attribute."""

    data_type: str = ""
    string_value: str | None = None
    binary_value: bytes | None = None
    string_list_values: list[str] = []
    binary_list_values: list[bytes] = []


class NewMessage(Request, frozen=True):
    """Message to send."""

    message_body: str = ""
    delay_seconds: int | None = None
    message_attributes: dict[str, Attribute] = {}
    message_system_attributes: dict[str, Attribute] = {}
    message_deduplication_id: str | None = None
    message_group_id: str | None = None


class SendMessage(NewMessage, frozen=True):
    """Request to send a message to a queue."""

    queue_url: str = ""


class SendEntry(NewMessage, frozen=True):
    """Message of a batch to send."""

    id: str = ""


class SendMessageBatch(QueueRequest, frozen=True):
    """Request to send messages."""

    entries: list[SendEntry] = []


class ReceiveMessage(QueueRequest, frozen=True):
    """Request to receive messages."""

    attribute_names: list[str] = []
    message_system_attribute_names: list[str] = []
    message_attribute_names: list[str] = []
    max_number_of_messages: int = 1
    visibility_timeout: int | None = None
    wait_time_seconds: int | None = None
    receive_request_attempt_id: str | None = None


class DeleteMessage(QueueRequest, frozen=True):
    """Request to delete a message."""

    receipt_handle: str = ""


class DeleteEntry(Request, frozen=True):
    """Message of a batch to delete."""

    id: str = ""
    receipt_handle: str = ""


class DeleteMessageBatch(QueueRequest, frozen=True):
    """Request to delete messages."""

    entries: list[DeleteEntry] = []


class ChangeMessageVisibility(DeleteMessage, frozen=True):
    """Request to change the visibility timeout of a message."""

    visibility_timeout: int | None = None


class VisibilityEntry(DeleteEntry, frozen=True):
    """Message of a batch whose visibility timeout is changed."""

    visibility_timeout: int | None = None


class ChangeMessageVisibilityBatch(QueueRequest, frozen=True):
    """Request to change the visibility timeouts of messages."""

    entries: list[VisibilityEntry] = []


class StartMessageMoveTask(Request, frozen=True):
    """Request to move the messages of a dead-letter queue."""

    source_arn: str = ""
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None


class ListMessageMoveTasks(Request, frozen=True):
    """Request for the move tasks of a dead-letter queue."""

    source_arn: str = ""
    max_results: int | None = None


class CancelMessageMoveTask(Request, frozen=True):
    """Request to cancel a move task."""

    task_handle: str = ""


class TaskHandle(Answer, frozen=True):
    """Handle of a move task."""

    task_handle: str


class MoveTask(Answer, frozen=True):
    """A move task."""

    task_handle: str | None = None
    status: str = ""
    source_arn: str = ""
    destination_arn: str | None = None
    max_number_of_messages_per_second: int | None = None
    approximate_number_of_messages_moved: int = 0
    approximate_number_of_messages_to_move: int = 0
    started_timestamp: int = 0


class MoveTasks(Answer, frozen=True):
    """Move tasks, newest first."""

    results: list[MoveTask] = []


class CancelledTask(Answer, frozen=True, omit_defaults=False):
    """Number of messages that a cancelled task moved."""

    approximate_number_of_messages_moved: int


class QueueUrl(Answer, frozen=True):
    """URL of a queue."""

    queue_url: str


class QueueUrls(Answer, frozen=True):
    """URLs of queues."""

    queue_urls: list[str] = []
    next_token: str | None = None


class SourceUrls(Answer, frozen=True):
    """URLs of the source queues of a dead-letter queue."""

    queue_urls: list[str] = field(name="queueUrls", default_factory=list)
    next_token: str | None = None


class Attributes(Answer, frozen=True):
    """Attributes of a queue."""

    attributes: dict[str, str] = {}


class Tags(Answer, frozen=True):
    """Tags of a queue."""

    tags: dict[str, str] = {}


class Sent(Answer, frozen=True):
    """Message that was sent."""

    id: str | None = None
    message_id: str = ""
    md5_of_message_body: str = field(name="MD5OfMessageBody", default="")
    md5_of_message_attributes: str | None = field(name="MD5OfMessageAttributes", default=None)
    md5_of_message_system_attributes: str | None = field(name="MD5OfMessageSystemAttributes", default=None)
    sequence_number: str | None = None


class Done(Answer, frozen=True):
    """Entry of a batch that was done."""

    id: str


class Failed(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Entry of a batch that was refused."""

    id: str
    sender_fault: bool
    code: str
    message: str


class BatchAnswer(msgspec.Struct, frozen=True, kw_only=True, rename="pascal"):
    """Outcome of each entry of a batch."""

    successful: list[Sent | Done] = []
    failed: list[Failed] = []


class Received(Answer, frozen=True):
    """Message that was received."""

    message_id: str
    receipt_handle: str
    md5_of_body: str = field(name="MD5OfBody")
    body: str = ""
    attributes: dict[str, str] = {}
    md5_of_message_attributes: str | None = field(name="MD5OfMessageAttributes", default=None)
    message_attributes: dict[str, Attribute] = {}


class Messages(Answer, frozen=True):
    """Messages that were received."""

    messages: list[Received] = []


def read(values: Any, kind: type[Request], *, is_text: bool = False) -> Any:
    """Return the parameters of an action.

    Arguments:
        values: decoded JSON, or texts of the query protocol.
        is_text: numbers are written as text.

    Raises: SqsError for parameters that are unknown, or of a wrong type.
    """
    try:
        return msgspec.convert(values, kind, strict=not is_text)
    except msgspec.ValidationError as error:
        text = str(error)
        if "unknown field" in text:
            raise SqsError(
                "InvalidParameterValueException", f"The request has an unknown parameter: {text}."
            ) from None
        raise SqsError("SerializationException", f"A parameter has a wrong type: {text}.") from None


def require(name: str, value: Any) -> Any:
    """Return a parameter that is required; raise SqsError without it."""
    if value in (None, "", {}, []):
        raise missing(name)
    return value
