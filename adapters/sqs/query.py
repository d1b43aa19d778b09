"""The query protocol of SQS: parameters as a form, answers as XML."""

import re
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import unquote_to_bytes
from xml.sax.saxutils import escape

import msgspec

from postroom.adapters.sqs.errors import SqsError

MAX_PARAMETERS = 2_000
MAX_PARTS = 10
UNQUOTED_BYTES = 1 << 16
_NAMESPACE = "http://queue.amazonaws.com/doc/2012-11-05/"
_MAPS = {
    "Attribute": ("Attributes", "Name", "Value"),
    "Tag": ("Tags", "Key", "Value"),
    "MessageAttribute": ("MessageAttributes", "Name", "Value"),
    "MessageSystemAttribute": ("MessageSystemAttributes", "Name", "Value"),
}
"""Parameters that are mappings: their member, and the names of key and value."""
_LISTS = {
    "AttributeName": "AttributeNames",
    "MessageAttributeName": "MessageAttributeNames",
    "MessageSystemAttributeName": "MessageSystemAttributeNames",
    "TagKey": "TagKeys",
    "SendMessageBatchRequestEntry": "Entries",
    "DeleteMessageBatchRequestEntry": "Entries",
    "ChangeMessageVisibilityBatchRequestEntry": "Entries",
}
"""Parameters that are lists, and their members."""
_IGNORED = frozenset(
    ("Action", "Version", "AWSAccessKeyId", "Signature", "SignatureMethod", "SignatureVersion", "Timestamp")
)
_ELEMENTS = {
    "Attributes": ("Attribute", "Name"),
    "MessageAttributes": ("MessageAttribute", "Name"),
    "Tags": ("Tag", "Key"),
    "QueueUrls": ("QueueUrl", ""),
    "queueUrls": ("QueueUrl", ""),
    "Messages": ("Message", ""),
    "Results": ("ListMessageMoveTasksResultEntry", ""),
    "Failed": ("BatchResultErrorEntry", ""),
}
"""Elements of answers for the entries of a member; for a mapping, with the name of the key."""
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_Tree = dict[str, Any]


def read_form(form: bytes) -> dict[str, str]:
    """Return the parameters of a request; raise SqsError when they are malformed."""
    parameters: dict[str, str] = {}
    try:
        if form.count(b"&") >= MAX_PARAMETERS:
            raise ValueError
        for part in form.split(b"&") if form else ():
            name, equals, value = part.partition(b"=")
            if not equals:
                raise ValueError
            text = _unquote(name)
            if text in parameters:
                raise SqsError("InvalidQueryParameter", "A parameter occurs twice.")
            parameters[text] = _unquote(value)
    except ValueError:
        raise SqsError("MalformedQueryString", "The query string contains a syntax error.") from None
    return {name: value for name, value in parameters.items() if not name.startswith("X-Amz-")}


def _unquote(text: bytes) -> str:
    """Return text without percent-encoding; raise ValueError if it is not UTF-8.

    It is decoded in parts, as the standard library makes an object of each escape.
    """
    text = text.replace(b"+", b" ")
    parts, start = [], 0
    while start < len(text):
        end = start + UNQUOTED_BYTES
        if end < len(text) and (cut := text.rfind(b"%", end - 2, end)) != -1:
            end = cut
        parts.append(unquote_to_bytes(text[start:end]))
        start = end
    return b"".join(parts).decode()


def read_parameters(action: str, form: dict[str, str]) -> _Tree:
    """Return the parameters of an action in the form of the JSON protocol."""
    tree: _Tree = {}
    for name, value in form.items():
        if name in _IGNORED:
            continue
        target, (*path, last) = tree, name.split(".", MAX_PARTS)
        if len(path) == MAX_PARTS:
            raise SqsError("InvalidQueryParameter", f"The parameter {name[:80]} is malformed.")
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise SqsError("InvalidQueryParameter", f"The parameter {name[:80]} is malformed.")
        if last in target:
            raise SqsError("InvalidQueryParameter", f"The parameter {name[:80]} is malformed.")
        target[last] = value
    members = _members(tree)
    if action == "CreateQueue" and "Tags" in members:
        members["tags"] = members.pop("Tags")
    return members


def _members(tree: _Tree) -> _Tree:
    members: _Tree = {}
    for name, value in tree.items():
        if value == "" and (name in _LISTS or name in _LISTS.values()):
            members[_LISTS.get(name, name)] = []
        elif name in _MAPS and isinstance(value, dict):
            member, key, inner = _MAPS[name]
            entries = _entries(name, value)
            members[member] = {_field(name, each, key): _value(_field(name, each, inner)) for each in entries}
            if len(members[member]) != len(entries):
                raise SqsError("InvalidQueryParameter", f"A name in {name} occurs twice.")
        elif name in _LISTS and isinstance(value, dict):
            members[_LISTS[name]] = [
                _members(each) if isinstance(each, dict) else each for each in _entries(name, value)
            ]
        else:
            members[name] = value
    return members


def _entries(name: str, value: _Tree) -> list[Any]:
    """Return the numbered entries of a parameter, in their order."""
    if not all(each.isascii() and each.isdecimal() and len(each) < 10 for each in value):
        raise SqsError("InvalidQueryParameter", f"The entries of {name} are numbered, such as {name}.1.")
    return [value[each] for each in sorted(value, key=int)]


def _field(name: str, entry: Any, field: str) -> Any:
    if not isinstance(entry, dict) or field not in entry or entry.keys() - {"Name", "Key", "Value"}:
        raise SqsError("MissingRequiredParameterException", f"An entry of {name} has no {field}.")
    return entry[field]


def _value(value: Any) -> Any:
    """Return the value of an attribute, with bytes in place of base64."""
    if isinstance(value, dict) and isinstance(value.get("BinaryValue"), str):
        try:
            return {**value, "BinaryValue": b64decode(value["BinaryValue"], validate=True)}
        except ValueError:
            raise SqsError("InvalidParameterValueException", "A BinaryValue is not base64.") from None
    return value


def write_answer(action: str, answer: Any, request_id: str) -> bytes:
    """Return an answer as XML."""
    values = msgspec.to_builtins(answer, builtin_types=(bytes,))
    result = "".join(_element(action, name, value) for name, value in values.items())
    body = f"<{action}Result>{result}</{action}Result>" if answer.__struct_fields__ else ""
    return (
        f'<?xml version="1.0"?><{action}Response xmlns="{_NAMESPACE}">{body}<ResponseMetadata>'
        f"<RequestId>{request_id}</RequestId></ResponseMetadata></{action}Response>"
    ).encode()


def write_error(error: SqsError, request_id: str) -> bytes:
    """Return an error as XML."""
    return (
        f'<?xml version="1.0"?><ErrorResponse xmlns="{_NAMESPACE}"><Error><Type>{error.fault}</Type>'
        f"<Code>{error.code}</Code><Message>{_escape(error.message)}</Message><Detail/></Error>"
        f"<RequestId>{request_id}</RequestId></ErrorResponse>"
    ).encode()


def _element(action: str, name: str, value: Any) -> str:
    if name == "Successful":
        return "".join(_tag(f"{action}ResultEntry", _inner(action, each)) for each in value)
    if isinstance(value, dict) and name in _ELEMENTS:
        tag, key = _ELEMENTS[name]
        return "".join(
            _tag(tag, _tag(key, _escape(each)) + _tag("Value", _inner(action, inner)))
            for each, inner in value.items()
        )
    if isinstance(value, list):
        return "".join(_tag(_ELEMENTS[name][0], _inner(action, each)) for each in value)
    return _tag(name, _inner(action, value))


def _inner(action: str, value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_element(action, name, inner) for name, inner in value.items())
    if isinstance(value, bytes):
        return b64encode(value).decode()
    if isinstance(value, bool):
        return "true" if value else "false"
    return _escape(str(value))


def _tag(name: str, inner: str) -> str:
    return f"<{name}>{inner}</{name}>"


def _escape(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text), {"\r": "&#13;", '"': "&quot;"})
