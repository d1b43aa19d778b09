"""Messages of SQS as messages of a mailbox, and back."""

import hashlib
import re
from base64 import b64encode
from collections.abc import Collection, Mapping

import msgspec

from postroom.adapters.sqs.attributes import OWN, Queue
from postroom.adapters.sqs.errors import SqsError, invalid_value, missing, unsupported
from postroom.adapters.sqs.requests import Attribute, NewMessage, Received
from postroom.application import messages
from postroom.application.messages import write_receipt
from postroom.application.received_messages import ReceivedMessage

TYPES = OWN + "types"
"""Header with the types of the attributes that are neither text nor a number without one, as JSON."""
GROUP = OWN + "MessageGroupId"
DEDUPLICATION = OWN + "MessageDeduplicationId"
TRACE = "AWSTraceHeader"
SOURCE = OWN + "deadLetterQueueSource"
"""Header with the ARN of the queue from which a message came into its dead-letter queue."""
MAX_ATTRIBUTES = 10
SYSTEM = frozenset(
    {
        "All",
        "SenderId",
        "SentTimestamp",
        "ApproximateReceiveCount",
        "ApproximateFirstReceiveTimestamp",
        "SequenceNumber",
        "MessageDeduplicationId",
        "MessageGroupId",
        "DeadLetterQueueSourceArn",
        TRACE,
    }
)
_BODY = re.compile("[\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]*")
_ATTRIBUTE = re.compile(r"(?!(?i:aws|amazon)\.)(?!\.)(?!.*\.\.)[A-Za-z0-9_.-]{1,256}(?<!\.)")
_TYPE = re.compile(r"(String|Number|Binary)(\.[^\x00-\x1f]{1,246})?")
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?")
_ID = re.compile(r"[A-Za-z0-9!\"#$%&'()*+,./:;<=>?@\[\\\]^_`{|}~-]{1,128}")
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, str]).decode


def md5(body: str) -> str:
    """Return `MD5OfMessageBody`."""
    return hashlib.md5(body.encode(), usedforsecurity=False).hexdigest()


def md5_of_attributes(attributes: Mapping[str, Attribute]) -> str | None:
    """Return `MD5OfMessageAttributes`; None without attributes."""
    if not attributes:
        return None
    digest = hashlib.md5(usedforsecurity=False)
    for name, attribute in sorted(attributes.items()):
        is_binary = attribute.data_type.startswith("Binary")
        value = attribute.binary_value if is_binary else (attribute.string_value or "").encode()
        digest.update(_counted(name.encode()) + _counted(attribute.data_type.encode()))
        digest.update((b"\2" if is_binary else b"\1") + _counted(value or b""))
    return digest.hexdigest()


def _counted(value: bytes) -> bytes:
    return len(value).to_bytes(4, "big") + value


def size_of(new: NewMessage) -> int:
    """Return the size of a message: its body, and names, types and values of its attributes, in bytes."""
    return len(new.message_body.encode()) + sum(
        len(name.encode())
        + len(each.data_type.encode())
        + len((each.string_value or "").encode())
        + len(each.binary_value or b"")
        for name, each in new.message_attributes.items()
    )


def to_message(queue: Queue, new: NewMessage) -> messages.NewMessage:
    """Return a message to be sent to the topic of a queue; raise SqsError naming what is not permitted."""
    if not new.message_body:
        raise missing("MessageBody")
    if not _BODY.fullmatch(new.message_body):
        raise SqsError("InvalidMessageContents", "The message contains characters outside the allowed set.")
    if (limit := queue.number("MaximumMessageSize")) < size_of(new):
        raise SqsError(
            "InvalidParameterValueException",
            f"One or more parameters are invalid. Reason: Message must be shorter than {limit} bytes.",
        )
    attrs, types = _attrs(new.message_attributes)
    for name, attribute in new.message_system_attributes.items():
        if name != TRACE or attribute.data_type != "String" or not attribute.string_value:
            raise invalid_value(
                f"MessageSystemAttributes.{name}", attribute.data_type, "It is not permitted."
            )
        attrs[OWN + TRACE] = attribute.string_value
    if types:
        attrs[TYPES] = _encode(types).decode()
    for name, value in (
        ("MessageGroupId", new.message_group_id),
        ("MessageDeduplicationId", new.message_deduplication_id),
    ):
        if value is not None and not _ID.fullmatch(value):
            raise invalid_value(name, value, "It has 1 to 128 letters, digits and punctuation characters.")
    idem_key, delay = None, new.delay_seconds
    if queue.is_fifo:
        if delay:
            raise invalid_value("DelaySeconds", delay, "A FIFO queue has a delay of the queue only.")
        idem_key = _deduplicate(queue, new, attrs)
    elif new.message_deduplication_id is not None:
        raise invalid_value(
            "MessageDeduplicationId",
            new.message_deduplication_id,
            "The request includes a parameter that is not valid for this queue type.",
        )
    if new.message_group_id is not None:
        attrs[GROUP] = new.message_group_id
    if delay is not None and not 0 <= delay <= 900:
        raise invalid_value("DelaySeconds", delay, "DelaySeconds must be >= 0 and <= 900.")
    return messages.NewMessage(
        topic=queue.name,
        payload=new.message_body.encode(),
        attrs=attrs,
        idem_key=idem_key,
        sticky_key=new.message_group_id,
        deliver_after_ms=1_000 * (queue.number("DelaySeconds") if delay is None else delay),
    )


def _deduplicate(queue: Queue, new: NewMessage, attrs: dict[str, str | bytes]) -> str:
    """Return the idempotency key of a message of a FIFO queue."""
    if new.message_group_id is None:
        raise missing("MessageGroupId")
    id_ = new.message_deduplication_id
    if id_ is None:
        if queue.attribute("ContentBasedDeduplication") != "true":
            raise SqsError(
                "InvalidParameterValueException",
                "The queue should either have ContentBasedDeduplication enabled or MessageDeduplicationId "
                "provided explicitly",
            )
        id_ = hashlib.sha256(new.message_body.encode()).hexdigest()
    attrs[DEDUPLICATION] = id_
    if queue.attribute("DeduplicationScope") == "queue":
        return id_
    return hashlib.sha256(f"{new.message_group_id} {id_}".encode()).hexdigest()


def _attrs(attributes: Mapping[str, Attribute]) -> tuple[dict[str, str | bytes], dict[str, str]]:
    """Return message attributes as headers, and the types of all but plain text."""
    if len(attributes) > MAX_ATTRIBUTES:
        raise SqsError(
            "InvalidParameterValueException",
            f"Number of message attributes [{len(attributes)}] exceeds the maximum [{MAX_ATTRIBUTES}].",
        )
    values: dict[str, str | bytes] = {}
    types: dict[str, str] = {}
    for name, attribute in attributes.items():
        what = f"message attribute '{name[:256]}'"
        if not _ATTRIBUTE.fullmatch(name):
            raise SqsError("InvalidParameterValueException", f"The name of the {what} is invalid.")
        kind = _TYPE.fullmatch(attribute.data_type)
        if kind is None:
            raise SqsError(
                "InvalidParameterValueException",
                f"The {what} has an invalid message attribute type, the set of supported type prefixes is "
                "Binary, Number, and String.",
            )
        if attribute.string_list_values or attribute.binary_list_values:
            raise unsupported(f"The {what} has list values, which are not implemented.")
        is_binary = kind[1] == "Binary"
        value = attribute.binary_value if is_binary else attribute.string_value
        other = attribute.string_value if is_binary else attribute.binary_value
        if not value or other is not None:
            raise SqsError(
                "InvalidParameterValueException",
                f"The {what} must contain a value of its type '{attribute.data_type}', and no other.",
            )
        if isinstance(value, str) and not _BODY.fullmatch(value):
            raise SqsError("InvalidParameterValueException", f"The {what} contains invalid characters.")
        if kind[1] == "Number" and not _NUMBER.fullmatch(str(value)):
            raise SqsError("InvalidParameterValueException", f"Can't cast the value of {what} to a number.")
        values[name] = value
        if attribute.data_type != "String":
            types[name] = attribute.data_type
    return values, types


def sequence_number(position: int) -> str:
    """Return the sequence number of a message of a FIFO queue: the position of its send in the log.

    It has the 20 digits of numbers of SQS, so that texts compare as the numbers do.
    """
    return f"{position:020}"


def to_received(
    queue: Queue,
    message: ReceivedMessage,
    names: Collection[str],
    system_names: Collection[str],
    first_received_ms: int | None,
) -> Received:
    """Return a delivery as SQS has it.

    Arguments:
        names: of message attributes, `All`, or prefixes with `.*`.
        system_names: of system attributes, or `All`.
        first_received_ms: when it was delivered first; None if it was not asked for.
    """
    attributes = {name: value for name, value in _attributes(message).items() if _is_asked_for(name, names)}
    body = _text(message.payload)
    return Received(
        message_id=original_id(message),
        receipt_handle=write_receipt(message.receipt),
        md5_of_body=md5(body),
        body=body,
        attributes=_system(queue, message, system_names, first_received_ms),
        md5_of_message_attributes=md5_of_attributes(attributes),
        message_attributes=attributes,
    )


def original_id(message: ReceivedMessage) -> str:
    """Return the id of a message; for a copy in a dead-letter queue, the id of the dead letter."""
    is_copy = SOURCE in message.attrs and message.causality_parent
    return message.causality_parent if is_copy and message.causality_parent else message.message_id


def _attributes(message: ReceivedMessage) -> dict[str, Attribute]:
    types = _types(message.attrs.get(TYPES))
    by_name: dict[str, Attribute] = {}
    for name, value in message.binary_attrs.items():
        if name.startswith(OWN):
            continue
        kind = types.get(name, "String")
        text = None if kind.startswith("Binary") else _decoded(value)
        if text is not None:
            by_name[name] = Attribute(data_type=kind, string_value=text)
        else:
            kind = kind if kind.startswith("Binary") else "Binary"
            by_name[name] = Attribute(data_type=kind, binary_value=value)
    return by_name


def _types(text: str | None) -> dict[str, str]:
    try:
        return {} if text is None else _decode(text)
    except msgspec.DecodeError:  # another sender wrote the header
        return {}


def _is_asked_for(name: str, names: Collection[str]) -> bool:
    return any(
        each in ("All", ".*", name) or (each.endswith(".*") and name.startswith(each[:-1])) for each in names
    )


def _system(
    queue: Queue, message: ReceivedMessage, names: Collection[str], first_received_ms: int | None
) -> dict[str, str]:
    attrs = message.attrs
    values = {
        "SenderId": message.principal or "AIDAPOSTROOM",
        "SentTimestamp": str((message.published_at_us or 0) // 1_000),
        "ApproximateReceiveCount": str(message.attempt),
        "ApproximateFirstReceiveTimestamp": None if first_received_ms is None else str(first_received_ms),
        "MessageGroupId": message.ordered_key or attrs.get(GROUP),
        TRACE: attrs.get(OWN + TRACE),
    }
    if queue.is_fifo:
        values["SequenceNumber"] = sequence_number(message.delivery.position)
        values["MessageDeduplicationId"] = attrs.get(DEDUPLICATION) or message.idem_key
    values["DeadLetterQueueSourceArn"] = attrs.get(SOURCE)
    is_all = "All" in names
    return {name: value for name, value in values.items() if value and (is_all or name in names)}


def _text(payload: bytes) -> str:
    """Return a payload as text, or in base64 if it is not text, as other senders may send bytes."""
    text = _decoded(payload)
    return b64encode(payload).decode() if text is None else text


def _decoded(value: bytes) -> str | None:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return None
    return text if _BODY.fullmatch(text) else None
