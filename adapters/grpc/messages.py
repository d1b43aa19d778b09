"""Translation between the messages of the contract and the structs of the application."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypeVar

import msgspec
from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.message import DecodeError, Message
from google.protobuf.struct_pb2 import ListValue, Struct

from postroom.adapters.grpc.v1 import mailbox_pb2 as pb
from postroom.application.messages import MessageDelivery, NewMessage, read_receipt, write_receipt
from postroom.application.query_results import Moment
from postroom.application.reports import RedriveReport
from postroom.domain.envelope.build import without_auth_token
from postroom.domain.envelope.headers import MailboxItem
from postroom.domain.errors import InvalidRequest
from postroom.domain.names import external_id, message_id
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.search import EventFilter, FoundMessage, Order, parse_status

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def read_request(kind: type[M], data: bytes) -> M:
    """Parse a request.

    Raises: InvalidRequest when it is malformed, or has fields that this version does not know (svc-mailbox
        C-8).
    """
    try:
        request = kind.FromString(data)
    except DecodeError:
        raise InvalidRequest(f"The request is not the encoding of a {kind.DESCRIPTOR.full_name}.") from None
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise InvalidRequest(
            f"{request.DESCRIPTOR.name} has fields that this server does not know; "
            "leave them out, or update the server."
        )
    return request


def set_fields(message: Message) -> dict[str, Any]:
    """Return the fields that are set, by name; maps and repeated messages as dicts, in tuples."""
    return {
        field.name: _as_builtins(value)
        if isinstance(value, Struct)
        else dict(value)
        if isinstance(value, Mapping)
        else tuple(set_fields(each) if isinstance(each, Message) else each for each in value)
        if field.is_repeated
        else value
        for field, value in message.ListFields()
    }


# -- messages to be sent ---


def read_new_message(message: pb.NewMessage) -> NewMessage:
    """Return the message of a send; the handler validates it."""
    return NewMessage(**{"topic": "", "payload": b"", **set_fields(message)})


def write_new_message(new: NewMessage, message: pb.NewMessage) -> None:
    """Write a valid new message into `message`."""
    for name in new.__struct_fields__:
        value = getattr(new, name)
        if name == "attrs":
            for key, attr in value.items():
                message.attrs[key] = attr if isinstance(attr, bytes) else attr.encode()
        elif value is not None:
            setattr(message, name, value)


# -- deliveries ---


def write_delivery(delivery: MessageDelivery, message: pb.ReceivedMessage) -> None:
    """Write a delivery into `message`, without the publisher's auth token."""
    message.message_id = message_id(delivery.receipt.message, delivery.external_id)
    message.topic = delivery.topic
    envelope = message.envelope
    envelope.MergeFromString(delivery.envelope)
    if envelope.security.auth_token:
        envelope.security.ClearField("auth_token")
    if envelope.metadata.topic != delivery.topic:
        message.published_topic = envelope.metadata.topic
    message.receipt = write_receipt(delivery.receipt)
    message.shard = delivery.shard
    message.attempt = delivery.attempt
    message.visible_at_us = delivery.due
    if delivery.idem_key is not None:
        message.idem_key = delivery.idem_key
    if delivery.ordered_key is not None:
        message.ordered_key = delivery.ordered_key
    message.payload_hash = delivery.payload_hash
    message.hash_chain = delivery.hash_chain


def read_delivery(message: pb.ReceivedMessage) -> MessageDelivery:
    """Return the delivery that `write_delivery` wrote."""
    receipt = read_receipt(message.receipt)
    return MessageDelivery(
        receipt,
        message.topic,
        message.shard,
        message.attempt,
        message.visible_at_us,
        external_id(receipt.message, message.message_id),
        message.idem_key if message.HasField("idem_key") else None,
        message.payload_hash,
        message.hash_chain,
        message.envelope.SerializeToString(),
        message.ordered_key if message.HasField("ordered_key") else None,
    )


# -- queries and their results ---


def write_result(result: msgspec.Struct, message: M) -> M:
    """Write a struct into the message with the same fields, and return the message."""
    values = msgspec.to_builtins(result)
    # Write the default action, too, so that a reader need not know it.
    if isinstance(result, RedriveSpec):
        values["action"] = result.action
    elif isinstance(result, RedriveReport):
        values["spec"]["action"] = result.spec.action
    return ParseDict(values, message)


def write_fields(fields: Mapping[str, object], message: Message) -> None:
    """Write the fields that are not None into the message.

    Raises: InvalidRequest for a field that the message does not have, or a value that it can't hold.
    """
    try:
        ParseDict({name: value for name, value in fields.items() if value is not None}, message)
    except ParseError as error:
        raise InvalidRequest(f"The {message.DESCRIPTOR.name} is invalid: {error}.") from None


def read_result(message: Message, result: type[T]) -> T:
    """Return the result that `write_result` wrote."""
    return msgspec.convert(_as_builtins(message), result)


def read_struct(message: Message, kind: type[T]) -> T:
    """Return the struct with the fields of a message, or with the form of the JSON that it contains.

    Raises: InvalidRequest naming what is wrong.
    """
    fields = _as_builtins(message) if isinstance(message, Struct) else set_fields(message)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"The {kind.__name__} is invalid: {error}.") from None


def public_envelope(blob: bytes) -> bytes:
    """Return a stored envelope without the publisher's auth token; empty if its bytes were altered."""
    try:
        return without_auth_token(blob)
    except InvalidRequest:
        return b""  # the altered bytes may contain a token


def write_item(result: FoundMessage, message: pb.FoundMessage) -> None:
    """Write a search result into `message`."""
    values = msgspec.to_builtins(
        msgspec.structs.replace(result, envelope_blob=public_envelope(result.envelope_blob))
    )
    item = {name: values.pop(name) for name in MailboxItem.__struct_fields__}
    ParseDict(values | {"status": result.status.name.lower(), "item": item}, message)


def read_item(message: pb.FoundMessage) -> FoundMessage:
    """Return the search result that `write_item` wrote."""
    values = _as_builtins(message)
    item = values.pop("item")
    return msgspec.convert(item | values | {"status": parse_status(values["status"])}, FoundMessage)


def write_filter(filter_: EventFilter) -> pb.QueryRequest:
    """Return the request of a search for envelopes; it omits the filter's mailbox, which is the server's."""
    defaults = EventFilter()
    values = {
        name: value
        for name, value in msgspec.structs.asdict(filter_).items()
        if name not in ("mailbox", "envelopes") and value != getattr(defaults, name)
    }
    if "statuses" in values:
        values["statuses"] = [status.name.lower() for status in filter_.statuses]
    return pb.QueryRequest(**values)


def read_filter(request: pb.QueryRequest, mailbox: str) -> EventFilter:
    """Return the filter of a search in one mailbox.

    Raises: InvalidRequest naming the value that is malformed or out of range.
    """
    values = set_fields(request)
    values["statuses"] = tuple(parse_status(status) for status in request.statuses)
    if "order" in values:
        if values["order"] not in {each.value for each in Order}:
            raise InvalidRequest(f"Unknown order {values['order']!r}; expected newest or oldest.")
        values["order"] = Order(values["order"])
    return EventFilter(**values, mailbox=mailbox)


def read_moment(moment: pb.Moment) -> Moment:
    """Return a past moment of a mailbox.

    Raises: InvalidRequest for a time that is not RFC 3339 with an offset.
    """
    if moment.WhichOneof("moment") == "position":
        return moment.position
    try:
        time = datetime.fromisoformat(moment.time)
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        raise InvalidRequest(
            f"The time {moment.time[:80]!r} is not RFC 3339 with an offset, such as 2026-01-31T12:00:00Z."
        )
    return time


def write_moment(at: Moment, moment: pb.Moment) -> None:
    """Write a past moment of a mailbox into `moment`."""
    if isinstance(at, datetime):
        moment.time = at.isoformat()
    else:
        moment.position = at


def _as_builtins(message: Message) -> dict[str, Any]:
    """Return all fields of a message by name; an absent optional field is None."""
    if isinstance(message, Struct):
        return {name: _plain(value) for name, value in message.items()}
    values: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            value = None
        elif isinstance(value, Struct):  # a Struct is a mapping, too
            value = _as_builtins(value)
        elif isinstance(value, Mapping):
            value = dict(value)
        elif field.is_repeated:
            value = [_as_builtins(each) if isinstance(each, Message) else each for each in value]
        elif isinstance(value, Message):
            value = _as_builtins(value)
        values[field.name] = value
    return values


def _plain(value: Any) -> Any:
    """Return a value of a Struct as Python has it in JSON: integral numbers become int."""
    if isinstance(value, Struct):
        return _as_builtins(value)
    if isinstance(value, ListValue):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
