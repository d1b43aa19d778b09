"""Operations of a mailbox as methods of `postroom.v1`: arguments become the fields with their names.

The tables here list methods and fields with other names, and arguments that are messages of the contract.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from google.protobuf.message import Message

from postroom.adapters.grpc import messages
from postroom.adapters.grpc.calls import METHODS
from postroom.application.operations.mailbox import OPERATIONS
from postroom.application.operations.operation import Arguments, Operation, Parameter
from postroom.application.page import Page, read_position
from postroom.application.worker_reports import WorkerState
from postroom.domain.policy import TopicPolicy
from postroom.domain.redrive.spec import RedriveSpec
from postroom.domain.schedule import ScheduleSpec
from postroom.domain.search import FoundMessage
from postroom.domain.settings import PolicyChanges, SettingsChanges
from postroom.domain.subscription import SubscriptionFilter

METHOD_NAMES = {
    "send_message": "send",
    "receive_messages": "recv",
    "ack_messages": "ack",
    "nack_messages": "nack",
    "extend_visibility": "extend",
    "redrive_dead_letters": "redrive",
    "purge_topic": "purge",
    "get_message": "get",
    "explain_message": "explain",
    "get_backlog": "backlog",
    "peek_messages": "peek",
    "search_messages": "query",
}
"""Methods of the contract whose names are not the names of their operations."""
BY_METHOD = {METHOD_NAMES.get(name, name): each for name, each in OPERATIONS.items()}
"""Operations by the names of their methods."""
_FIELDS = {"msg_id": "message_id", "message_ids": "only"}
"""Fields that are not named as the argument or answer."""
_DEAD_LETTERS = "dead_letters"
"""Field of dead letters; on the last page, the cursor is empty, not absent: older servers send none."""


def method_name(operation: Operation) -> str:
    """Return the method of the contract for an operation."""
    return METHOD_NAMES.get(operation.name, operation.name)


class _Codec(NamedTuple):
    """How an argument is written into a request, and read from its field if it is set."""

    write: Callable[[Any, Any], None]
    read: Callable[[Any], Any]


def _write_policy(policy: PolicyChanges, request: Any) -> None:
    request.unset.extend(name for name, value in policy.items() if value is None)
    messages.write_fields(policy, request.policy)


def _write_ids(ids: list[str], request: Any) -> None:
    request.only.message_ids.extend(ids)
    request.only.SetInParent()


def _write_cursor(cursor: str, request: Any) -> None:
    request.cursor = read_position(cursor) if isinstance(request.cursor, int) else cursor


def _moment(field: str) -> _Codec:
    return _Codec(
        lambda at, request: messages.write_moment(at, getattr(request, field)), messages.read_moment
    )


def _struct(field: str, kind: type[msgspec.Struct]) -> _Codec:
    return _Codec(
        lambda value, request: messages.write_result(value, getattr(request, field)),
        lambda message: messages.read_struct(message, kind),
    )


_CODECS = {
    "at": _moment("at"),
    "start": _moment("start"),
    "changes": _struct("changes", SettingsChanges),
    "cursor": _Codec(_write_cursor, str),  # some cursors are numbers in the contract
    "filter_": _struct("filter", SubscriptionFilter),
    "ids": _Codec(lambda ids, request: request.ids.extend(ids), list),
    "message_ids": _Codec(_write_ids, lambda field: list(field.message_ids)),
    "policy": _Codec(_write_policy, messages.set_fields),
    "schedule": _struct("schedule", ScheduleSpec),
    "spec": _struct("spec", RedriveSpec),
    "worker": _struct("worker", WorkerState),
}
"""Arguments that are messages of the contract."""


def write_request(operation: Operation, arguments: Arguments) -> Any:
    """Return the request of a method with these arguments."""
    if operation.name == "search_messages":
        return messages.write_filter(arguments["filter_"])
    request = METHODS[method_name(operation)].request()
    for parameter in operation.parameters:
        value = arguments[parameter.name]
        if value is None or not parameter.is_sent:
            continue
        if parameter.name in _CODECS:
            _CODECS[parameter.name].write(value, request)
        else:
            setattr(request, _field(parameter), value)
    return request


def read_arguments(operation: Operation, request: Any) -> dict[str, Any]:
    """Return the arguments that a request has; the operation checks them.

    Raises: InvalidRequest for a moment, specification or settings that can't be read.
    """
    present = {field.name for field, _ in request.ListFields()}
    arguments = {
        parameter.name: _read_argument(parameter, request)
        for parameter in operation.parameters
        if parameter.is_sent and (parameter.is_required or _field(parameter) in present)
    }
    if "policy" in arguments:
        arguments["policy"] |= dict.fromkeys(request.unset)
    return arguments


def _read_argument(parameter: Parameter, request: Any) -> Any:
    field = getattr(request, _field(parameter))
    return _CODECS[parameter.name].read(field) if parameter.name in _CODECS else field


def write_answer(operation: Operation, result: Any) -> Any:
    """Return the response of a method with a result."""
    response = METHODS[method_name(operation)].response()
    field = _answer_field(operation, response)
    if result is None:
        return response
    if isinstance(result, Page):
        if result.next_cursor is not None or field == _DEAD_LETTERS:
            response.next_cursor = result.next_cursor or ""
        result = [*result.items]
    if isinstance(result, list):
        for each in result:
            write = messages.write_item if isinstance(each, FoundMessage) else messages.write_result
            write(each, getattr(response, field).add())
    elif isinstance(result, msgspec.Struct):
        messages.write_result(result, getattr(response, field) if field else response)
    else:
        setattr(response, field, result)
    return response


def read_answer(operation: Operation, response: Any) -> Any:
    """Return the result in a response of a method."""
    kind, field = operation.result, _answer_field(operation, response)
    if operation.items is not None:
        (item,) = get_args(kind)
        items = tuple(
            messages.read_item(each) if item is FoundMessage else messages.read_result(each, item)
            for each in getattr(response, field)
        )
        cursor = response.next_cursor or None
        if field == _DEAD_LETTERS and items and not response.HasField("next_cursor"):
            cursor = str(items[-1].position)  # for a server that returns no cursor
        return Page(items, cursor)
    if kind is type(None):
        return None
    if get_origin(kind) is list:
        return [messages.read_result(each, get_args(kind)[0]) for each in getattr(response, field)]
    if not field:
        return messages.read_result(response, kind)
    value = getattr(response, field)
    if kind is TopicPolicy:  # its fields may be absent
        return TopicPolicy(**messages.set_fields(value))
    return messages.read_result(value, kind) if isinstance(value, Message) else kind(value)


def _field(parameter: Parameter) -> str:
    """Return the field of an argument in requests."""
    return _FIELDS.get(parameter.sent_as, parameter.sent_as)


def _answer_field(operation: Operation, response: Any) -> str:
    """Return the field with the result; "" if the response has its fields."""
    for field in ("job", "subscription", "schedule", "search", _DEAD_LETTERS):
        if field in response.DESCRIPTOR.fields_by_name:
            return field
    return _FIELDS.get(operation.answer, operation.answer)
