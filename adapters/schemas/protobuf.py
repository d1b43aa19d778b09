"""Validation of payloads against protobuf messages in a FileDescriptorSet."""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import Error as JsonError
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from postroom.domain.errors import InvalidRequest

MAX_PROBLEMS = 5
"""Limit on the problems of each kind reported for one payload."""


class ProtobufSchema:
    """A protobuf message type that payloads are validated against."""

    def __init__(self, descriptors: "Descriptors", message_name: str, *, allows_unknown_fields: bool) -> None:
        """Find a message by name, with or without its package; raise `InvalidRequest` when it is missing."""
        self._pool = descriptors.pool
        self._descriptor = descriptors.find(message_name)
        self._parse = GetMessageClass(self._descriptor).FromString
        self._allows_unknown_fields = allows_unknown_fields

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield a payload's problems, each as a predicate of `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """
        name = self._descriptor.full_name
        if problem := self._other_type(payload):
            yield problem
            return
        try:
            message = self._parse(data)
        except DecodeError:
            yield self._undecodable()
            return
        for field in islice(_missing_fields(message), MAX_PROBLEMS):
            yield f"lacks the required field {field} of {name}"
        if not self._allows_unknown_fields:
            size = len(message.SerializePartialToString())
            message.DiscardUnknownFields()  # recursive, and much faster than Python
            if len(message.SerializePartialToString()) != size:
                for place in islice(_unknown_fields(self._parse(data), ""), MAX_PROBLEMS):
                    yield f"has a field that {name} does not define: {place}"

    def decode(self, payload: any_pb2.Any, data: bytes) -> Any:
        """Return a payload as the value of its JSON, with fields named as in the descriptor.

        Raises: InvalidRequest when it can't be decoded, is of another type, or has no JSON.
        """
        if problem := self._other_type(payload):
            raise InvalidRequest(problem)
        try:
            message = self._parse(data)
        except DecodeError:
            raise InvalidRequest(self._undecodable()) from None
        try:
            return MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=self._pool)
        except (JsonError, TypeError, ValueError):  # a time out of range, or an Any of an unknown type
            raise InvalidRequest(f"is a {self._descriptor.full_name} that has no JSON") from None

    def _other_type(self, payload: any_pb2.Any) -> str | None:
        type_name, name = payload.type_url.rpartition("/")[2], self._descriptor.full_name
        return f"has the type {type_name}, not {name}" if type_name not in ("", name) else None

    def _undecodable(self) -> str:
        return f"can't be decoded as {self._descriptor.full_name}"


class Descriptors:
    """The message types in a FileDescriptorSet."""

    def __init__(self, file: Path) -> None:
        """Read a FileDescriptorSet, as `protoc --include_imports --descriptor_set_out` writes it.

        Raises: InvalidRequest when it can't be read or is invalid.
        """
        self._file = file
        self.pool = DescriptorPool()
        self._names: list[str] = []
        for descriptor in _read(file).file:
            try:
                self.pool.Add(descriptor)
            except TypeError as error:
                raise InvalidRequest(
                    f"The descriptors in {file} are inconsistent at {descriptor.name} "
                    f"({error}); write them with protoc --include_imports."
                ) from error
            prefix = f"{descriptor.package}." if descriptor.package else ""
            self._names += _message_names(descriptor.message_type, prefix)
        if not self._names:
            raise InvalidRequest(
                f"{file} contains no message type; write it with protoc --include_imports "
                "--descriptor_set_out."
            )

    def find(self, name: str) -> Descriptor:
        """Return a message type by name, with or without its package; raise `InvalidRequest` when missing."""
        matches = [full for full in self._names if full == name or full.endswith(f".{name}")]
        if name in matches:  # an exact match wins over suffixes
            matches = [name]
        if not matches:
            close = get_close_matches(name, [*self._names, *(n.rpartition(".")[2] for n in self._names)], 1)
            raise InvalidRequest(
                f"{self._file} contains no message type {name}"
                f"{f' (did you mean {close[0]}?)' if close else ''}; it has {_some(self._names)}."
            )
        if len(matches) > 1:
            raise InvalidRequest(
                f"{self._file} contains several message types {name}; name one of {_some(matches)}."
            )
        return self.pool.FindMessageTypeByName(matches[0])


def _read(file: Path) -> FileDescriptorSet:
    if file.suffix == ".proto":
        raise InvalidRequest(
            f"{file} is protobuf source; compile it with protoc --include_imports "
            f"--descriptor_set_out={file.stem}.binpb {file.name} and name that file."
        )
    try:
        return FileDescriptorSet.FromString(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"The descriptors {file} can't be read: {error.strerror or error}; name a file that exists."
        ) from error
    except DecodeError:
        raise InvalidRequest(
            f"{file} is not a FileDescriptorSet; write it with protoc --include_imports --descriptor_set_out."
        ) from None


def _message_names(messages: Any, prefix: str) -> Iterator[str]:
    message: DescriptorProto
    for message in messages:
        if not message.options.map_entry:
            name = f"{prefix}{message.name}"
            yield name
            yield from _message_names(message.nested_type, f"{name}.")


def _some(names: list[str]) -> str:
    return ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _missing_fields(message: Any) -> list[str]:  # the stubs lack the method
    """Return the paths of missing required fields."""
    missing: list[str] = message.FindInitializationErrors()
    return missing


def _unknown_fields(message: Message, place: str) -> Iterator[str]:
    """Yield the paths of unknown fields, such as `customer.number 7`."""
    unknown_fields: Any = UnknownFieldSet(message)  # the stubs don't declare it a sequence
    for unknown in unknown_fields:
        yield f"{place}number {unknown.field_number}"
    for field, value in message.ListFields():
        if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_GROUP):
            for inner, key in _messages_in(field, value):
                yield from _unknown_fields(inner, f"{place}{field.name}{key}.")


def _messages_in(field: FieldDescriptor, value: Any) -> Iterator[tuple[Message, str]]:
    """Yield the messages in a field's value, each with its index."""
    kind = field.message_type
    if not field.is_repeated:
        yield value, ""
    elif kind is None or not kind.GetOptions().map_entry:
        for index, inner in enumerate(value):
            yield inner, f"[{index}]"
    elif kind.fields_by_name["value"].message_type is not None:
        for key in value:
            yield value[key], "[...]"  # keys may be personal data, and problems are logged
