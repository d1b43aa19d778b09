"""Validation of payloads against a JSON Schema."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema_rs
import msgspec
from google.protobuf import any_pb2

from postroom.domain.envelope.content import (
    decode_json,
)
from postroom.domain.errors import InvalidRequest

MAX_PROBLEMS = 5
"""Limit on the problems reported for one payload."""
MASK = "the value"
"""Replaces values of the payload in problems: they may be personal data, and problems are logged."""


class JsonSchema:
    """A JSON Schema, of the draft in its `$schema` or 2020-12.

    A `$ref` may only refer to files in the schema's folder; nothing is fetched over a network.
    """

    def __init__(self, file: Path) -> None:
        """Compile the schema in a file; raise `InvalidRequest` when it can't be read or is invalid."""
        schema, references = _read(file), _References(file.absolute().parent)
        try:
            self._validator = jsonschema_rs.validator_for(
                schema, retriever=references.retrieve, base_uri=file.absolute().as_uri(), mask=MASK
            )
        except (ValueError, OverflowError) as error:
            problem = references.problem or str(error)
            if isinstance(error, jsonschema_rs.ValidationError) and not references.problem:
                problem = f"{_place(error.instance_path)}{error.message}"
            raise InvalidRequest(f"{file} is not a valid JSON Schema: {problem}.") from error

    def problems(self, payload: any_pb2.Any, data: bytes) -> Iterator[str]:
        """Yield a payload's problems, each as a predicate of `the payload`.

        Arguments:
            data: the payload's value, decompressed.
        """
        try:
            value = decode_json(data)
        except InvalidRequest as error:
            yield str(error)
            return
        try:
            for violation in islice(self._validator.iter_errors(value), MAX_PROBLEMS):
                yield f"violates its schema: {_place(violation.instance_path)}{violation.message}"
        except (ValueError, OverflowError) as error:
            yield f"can't be validated: {error}"

    def decode(self, payload: any_pb2.Any, data: bytes) -> Any:
        """Return the value of a payload; raise `InvalidRequest` if it is not JSON."""
        return decode_json(data)


class _References:
    """Retriever of the files that a schema refers to; it stores the reason why one can't be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.problem: str | None = None

    def retrieve(self, uri: str) -> Any:
        parts = urlsplit(uri)
        path = Path(unquote(parts.path)).resolve()
        try:
            if parts.scheme != "file" or not path.is_relative_to(self._folder):
                raise InvalidRequest(f"it refers to {uri}; only files in the schema's folder are read.")
            return _read(path)
        except InvalidRequest as error:
            self.problem = str(error).removesuffix(".")
            raise


def _read(file: Path) -> Any:
    try:
        return msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"The schema {file} can't be read: {error.strerror or error}; name a file that exists."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The schema {file} is not JSON: {error}.") from error


def _place(path: list[str | int]) -> str:
    """Return a location in a document as the prefix of a message."""
    return f"at /{'/'.join(map(str, path))}: " if path else ""
