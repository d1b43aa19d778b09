"""Check payloads against protobuf messages, as a FileDescriptorSet describes them."""

from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from typing import Any

from google.protobuf import any_pb2
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.unknown_fields import UnknownFieldSet

from postroom.domain.errors import InvalidRequest

MAX_PROBLEMS = 5
"""Unknown fields named for one payload: enough to see what is wrong, few enough to read."""


class ProtobufSchema:
    """Check payloads of one protobuf message type."""

    def __init__(self, descriptors: "Descriptors", message_name: str, *, allows_unknown_fields: bool) -> None:
        """Take a message's name, with or without its package; raise `InvalidRequest` if there is no such."""
        self._descriptor = descriptors.find(message_name)
        self._parse = GetMessageClass(self._descriptor).FromString
        self._allows_unknown_fields = allows_unknown_fields

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield what is wrong with a payload, in words that go on from `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """
        name = self._descriptor.full_name
        named = payload.type_url.rpartition("/")[2]
        if named and named != name:
            yield f"is said to be a {named}, not a {name}"
            return
        try:
            message = self._parse(data)
        except DecodeError:
            yield f"is no {name}: its bytes can't be decoded as one"
            return
        for field in islice(_missing(message), MAX_PROBLEMS):
            yield f"is no whole {name}: it lacks the required field {field}"
        if not self._allows_unknown_fields:
            size = len(message.SerializePartialToString())
            message.DiscardUnknownFields()  # looks everywhere, and far faster than we could
            if len(message.SerializePartialToString()) != size:
                for place in islice(_unknown_fields(self._parse(data), ""), MAX_PROBLEMS):
                    yield f"has a field that {name} doesn't know: {place}"


class Descriptors:
    """The messages that one file describes."""

    def __init__(self, file: Path) -> None:
        """Read a FileDescriptorSet, as `protoc --include_imports --descriptor_set_out` writes it.

        Raises: InvalidRequest when it can't be read or used.
        """
        self._file = file
        self._pool = DescriptorPool()
        self._names: list[str] = []
        for described in _read(file).file:
            try:
                self._pool.Add(described)
            except TypeError as error:
                raise InvalidRequest(
                    f"The descriptors in {file} can't be used, as {described.name} does not fit the others "
                    f"({error}); write them with protoc --include_imports."
                ) from error
            prefix = f"{described.package}." if described.package else ""
            self._names += _message_names(described.message_type, prefix)
        if not self._names:
            raise InvalidRequest(
                f"{file} describes no message; write it with protoc --include_imports --descriptor_set_out."
            )

    def find(self, name: str) -> Descriptor:
        """Return the message of a name, with or without its package; raise `InvalidRequest` if none is it."""
        found = [full for full in self._names if full == name or full.endswith(f".{name}")]
        if name in found:  # a whole name is never mistaken for the end of another
            found = [name]
        if not found:
            close = get_close_matches(name, [*self._names, *(n.rpartition(".")[2] for n in self._names)], 1)
            raise InvalidRequest(
                f"{self._file} describes no message {name}"
                f"{f' (did you mean {close[0]}?)' if close else ''}; it has {_some(self._names)}."
            )
        if len(found) > 1:
            raise InvalidRequest(
                f"{self._file} describes several messages {name}; name one of {_some(found)}."
            )
        return self._pool.FindMessageTypeByName(found[0])


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
            f"{file} is no FileDescriptorSet; write it with protoc --include_imports --descriptor_set_out."
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


def _missing(message: Any) -> list[str]:  # the stubs don't know the method
    """Return the places of required fields that a message lacks."""
    missing: list[str] = message.FindInitializationErrors()
    return missing


def _unknown_fields(message: Message, place: str) -> Iterator[str]:
    """Yield where a message has unknown fields, such as `customer.number 7`."""
    unknown_fields: Any = UnknownFieldSet(message)  # the stubs don't know that it is a sequence
    for unknown in unknown_fields:
        yield f"{place}number {unknown.field_number}"
    for field, value in message.ListFields():
        if field.type in (FieldDescriptor.TYPE_MESSAGE, FieldDescriptor.TYPE_GROUP):
            for inner, key in _messages_in(field, value):
                yield from _unknown_fields(inner, f"{place}{field.name}{key}.")


def _messages_in(field: FieldDescriptor, value: Any) -> Iterator[tuple[Message, str]]:
    """Yield the messages in a field's value, each with its place in it."""
    kind = field.message_type
    if not field.is_repeated:
        yield value, ""
    elif kind is None or not kind.GetOptions().map_entry:
        for index, inner in enumerate(value):
            yield inner, f"[{index}]"
    elif kind.fields_by_name["value"].message_type is not None:
        for key in value:
            yield value[key], "[...]"  # keys may be personal data, and problems are logged
